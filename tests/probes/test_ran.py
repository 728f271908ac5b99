import torch

from steplab.probes.ran import optimizer_impl, profiled_step


def test_ops_and_dtypes_are_seen():
    x = torch.randn(4, 4)

    def run():
        x @ x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x @ x

    ran = profiled_step(run, on_cuda=False)
    assert ran.matmul_dtypes == {"float": 1, "c10::BFloat16": 1}
    assert ran.kernel_launches is None and ran.step_ms > 0


def test_optimizer_choice_is_read_from_its_groups():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert optimizer_impl(None) == ""
    assert optimizer_impl(torch.optim.AdamW([weight])) == "forloop"
    assert optimizer_impl(torch.optim.AdamW([weight], fused=True)) == "fused"
    assert optimizer_impl(torch.optim.AdamW([weight], foreach=True)) == "foreach"
    assert optimizer_impl(torch.optim.AdamW([weight], foreach=False)) == "forloop"
