"""A few steps of a tiny model, to be run in one process and in ranks and compared."""

from steplab.core import RunSpec
from steplab.modules.shards import whole, wholes
from steplab.parallel.world import current_world
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload

# Sizes that 2 and 4 do not divide, so that shards differ and some are padded.
SMALL = {
    "gpt": {
        "width": 24,
        "ff_width": 42,
        "layers": 2,
        "heads": 2,
        "context": 16,
        "vocab_size": 67,
    },
    "tsmoe": {
        "hidden_size": 24,
        "d_ff": 36,
        "d_expert": 20,
        "n_decoder_layers": 2,
        "n_head": 2,
        "horizons": "1,3",
        "num_experts": 5,
        "seq_max_len": 16,
    },
}
SMALL["tsmoe4"] = SMALL["tsmoe"] | {"num_experts": 4}  # that two ranks can share


def small_spec(workload, recipe, accumulate, clip=0.1, **changes):
    """Return a spec for the ranks that there are, whose clip binds."""
    config, workload = SMALL[workload], workload.rstrip("4")
    resolved = find_workload(workload).resolve("tiny", config)
    return RunSpec(
        workload,
        resolved,
        "tiny",
        batch=2,
        accumulate=accumulate,
        recipe=parse_recipe(recipe),
        clip=clip,
        **{"ranks": current_world().size, **changes},
    )


def train_steps(workload, recipe, accumulate, steps=3):
    """Return (losses, whole weights by name) after a few steps."""
    spec = small_spec(workload, recipe, accumulate)
    step = assemble(spec)
    feed = micro_batches(step, spec)
    losses = [step(next(feed)).loss.item() for _ in range(steps)]
    return losses, whole_weights(step.model)


def whole_weights(model):
    """Return every parameter, whole, by name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = wholes([p.detach() for p in parameters])
    return {name: weight.clone() for name, weight in zip(names, found, strict=True)}


def figures(workload: str, recipe: str, accumulate: int, device: str) -> tuple[float, ...]:
    """Return the losses of a few steps and the norm of every parameter after them."""
    spec = small_spec(workload, recipe, accumulate, device=device)
    step = assemble(spec)
    feed = micro_batches(step, spec)
    losses = [step(next(feed)).loss.item() for _ in range(3)]
    weights = [whole(p.detach()).double().norm().item() for p in step.model.parameters()]
    return (*losses, *weights)
