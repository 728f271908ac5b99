"""The winner against a recipe that somebody else has found. No torch."""

from __future__ import annotations

from dataclasses import replace

from steplab.engine.gate.remote import RemoteCandidate
from steplab.errors import SteplabError
from steplab.record.ladder import Peer
from steplab.spec import Recipe
from steplab.tune.ceilings import step_ms
from steplab.tune.champion import Champion
from steplab.tune.impact import interval, speed_up
from steplab.tune.trying import Rules
from steplab.tune.turns import take_turns
from steplab.tune.view import View


def held_against(
    recipe: Recipe, champion: Champion, rules: Rules, timeout: float, view: View
) -> Peer:
    """Open `recipe` beside the champion and measure both in turns; its numerics are not asked."""
    spec = replace(champion.run.spec, recipe=recipe)
    candidate = RemoteCandidate(spec, champion.run.environment, rules.spares)
    try:
        run = candidate.open((), rules.references, timeout, view.stage).run
        if run.status != "ok":
            return Peer(recipe, reason=f"{run.status}: {run.reason}")
        both = (candidate, champion.candidate)
        bounds = (rules.turns_seconds, timeout)
        turns = take_turns(*both, step_ms(champion.run), *bounds, view.stage)
        return Peer(recipe, turns.before, turns.after, turns.change)
    except SteplabError as error:
        return Peer(recipe, reason=str(error))
    finally:
        candidate.close()


def peer_line(peer: Peer) -> str:
    """The winner against the peer, in one sentence."""
    if peer.change is None or peer.theirs is None or peer.ours is None:
        return f"{peer.recipe.label} could not be measured: {peer.reason}"
    speed = f"{speed_up(peer.change)} ({interval(peer.change)}) of the speed of {peer.recipe.label}"
    return f"{speed}: {peer.ours.median:.4g} ms against {peer.theirs.median:.4g} ms a step"
