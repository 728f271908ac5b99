"""Checkpoints of small models, as `steplab train` writes them."""

from steplab.cli.main import main

TINY = """--hidden-size 16 --n-decoder-layers 1 --n-head 2 --num-experts 2 --d-ff 16 --d-expert 8
--seq-max-len 40 --horizons 1,8 --batch-size 2 --log-every 2 --validation-batches 1""".split()


def train(folder, *words, steps=2):
    folder.mkdir(exist_ok=True)
    done = main(
        ["train", *TINY, *words, "--checkpoint-dir", str(folder), "--steps-per-epoch", str(steps)]
    )
    assert done == 0
    return folder
