from dataclasses import replace

from steplab.core import Run, RunSpec, fingerprint, new_run_id
from steplab.store import open_sweep
from tests.store.test_store import ENVIRONMENT

SPECS = [RunSpec("gpt", batch=n) for n in (1, 2, 3)]


def save(store, sweep, spec):
    store.save(Run(new_run_id(spec), spec, ENVIRONMENT, group=sweep.id))


def test_an_unfinished_sweep_goes_on(store):
    first = open_sweep(store, SPECS, ENVIRONMENT)
    save(store, first, SPECS[0])
    again = open_sweep(store, SPECS, ENVIRONMENT)
    assert again.id == first.id and set(again.finished) == {fingerprint(SPECS[0])}


def test_a_finished_sweep_is_measured_again(store):
    first = open_sweep(store, SPECS, ENVIRONMENT)
    for spec in SPECS:
        save(store, first, spec)
    again = open_sweep(store, SPECS, ENVIRONMENT)
    assert again.id != first.id and again.finished == {}


def test_other_cells_or_another_machine_start_over(store):
    first = open_sweep(store, SPECS, ENVIRONMENT)
    save(store, first, SPECS[0])
    assert open_sweep(store, SPECS[:2], ENVIRONMENT).finished == {}
    elsewhere = replace(ENVIRONMENT, cpu="another")
    assert open_sweep(store, SPECS, elsewhere).finished == {}
