"""What people hand in by mistake with a model of their own, said in their words.

Every sentence says what was found and what is expected, and ends with the line to write.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from steplab.core.errors import SteplabError, Unsupported, UserError
from steplab.trace.lines import user_line
from steplab.trace.user_frames import error_line
from steplab.workloads.workload import StepOutput

MODEL = "Write model=Net(...), with your own nn.Module."
BATCHES = "Write batches=lambda size: DataLoader(dataset, batch_size=size), or yield batches."
LOSS = "Write loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])."
OPTIMIZER = "Write optimizer=lambda model, **how: torch.optim.AdamW(model.parameters(), **how)."
USER_MODEL = "End it with: return steplab.UserModel(model=..., batches=..., loss=...)."
NO_CLOSURE = "Use an optimizer whose step() needs no closure, such as AdamW or SGD."
ONE_OPTIMIZER = "Put all parameters into one, as groups: AdamW([{'params': ..., 'lr': ...}, ...])."

SIGNATURES = {
    "loss": "loss(model, batch)",
    "predict": "predict(model, batch)",
    "optimizer": "optimizer(model, **how)",
}
NO_GPU = "not compiled with CUDA|No CUDA GPUs|NVIDIA driver"  # how torch says that there is none
SHOWN_NAMES = 3  # of the parameters that a sentence is about


def refuse_result(where: str, result: Any) -> UserError:
    """Return the error for a factory that returned something else than a UserModel."""
    found = f"{describe(result)}, not a UserModel"
    if result is None:
        found = "nothing, but a UserModel is expected"
    return UserError(f"{where} returned {found}.", USER_MODEL)


def explain_factory_error(where: str, error: Exception, known: Sequence[str]) -> UserError | None:
    """Return what was misunderstood where an error inside the factory shows it; else None.

    `known` are the arguments of a UserModel.
    """
    if isinstance(error, TypeError) and "UserModel.__init__() " in str(error):
        return _wrong_arguments(where, str(error).partition("UserModel.__init__() ")[2], known)
    if re.search(NO_GPU, str(error)):
        return UserError(
            f"{where} puts its model on a GPU ({error_line(error)}), and torch sees none here.",
            "Leave out .cuda() and device='cuda': the model goes where --device says.",
        )
    return None


def _wrong_arguments(where: str, problem: str, known: Sequence[str]) -> UserError:
    names = re.findall(r"'(\w+)'", problem)
    if "missing" not in problem:
        takes = f"It takes {', '.join(known[:-1])} and {known[-1]}."
        return UserError(f"{where}: UserModel {problem}.", takes)
    lines = {"model": MODEL, "batches": BATCHES, "loss": LOSS}
    return UserError(f"{where}: UserModel got no {' and no '.join(names)}.", lines[names[-1]])


def check_model(where: str, model: Any) -> None:
    """Refuse what is no module: a class, a function, a list of modules."""
    if isinstance(model, nn.Module):
        return
    line = MODEL
    if inspect.isclass(model) or inspect.isroutine(model):
        line = f"Call it: model={model.__name__}(...)."
    elif isinstance(model, (list, tuple, dict)):
        line = "Make one module of them, whose forward calls the others."
    raise UserError(f"{where}: the model is {describe(model)}, not an nn.Module.", line)


def check_values(where: str, model: nn.Module) -> None:
    """Refuse weights without values, unless no values are asked for."""
    if torch.get_default_device().type != "meta" and any(p.is_meta for p in model.parameters()):
        raise UserError(
            f"{where}: the weights of the model are on the meta device and have no values.",
            "Build it outside torch.device('meta'); steplab moves it to its device.",
        )


def check_batches(where: str, batches: Any) -> None:
    """Refuse what is no function of the batch size."""
    line = BATCHES
    if isinstance(batches, DataLoader):
        found = "a DataLoader, whose batch size is fixed"
    elif isinstance(batches, Dataset):
        found = f"the dataset {type(batches).__name__}"
    elif not callable(batches) or inspect.isclass(batches):
        found = describe(batches)
        if isinstance(batches, (list, tuple)):
            line = "Write batches=lambda size: [...], with batches of that size."
    elif not accepts(batches, 1):
        found = f"{describe(batches)}, which cannot be called with a batch size"
        line = "Write def batches(size): ... and yield batches of that size."
    else:
        return
    raise UserError(f"{where}: the batches are {found}, not a function batches(size).", line)


def check_loss(where: str, loss: Any, name: str = "loss") -> None:
    """Refuse what cannot be called as loss(model, batch); `name` may be "predict" too."""
    kind = describe(loss)
    line = LOSS if name == "loss" else "Write predict=lambda model, batch: model(batch[0])."
    if name == "loss" and (_is_criterion(loss) or isinstance(loss, nn.Module)):
        line = f"Write loss=lambda model, batch: {_criterion(loss)}(model(batch[0]), batch[1])."
    elif callable(loss) and not isinstance(loss, (type, nn.Module)):
        if accepts(loss, 2):
            return
        kind += ", which takes other arguments"
    raise UserError(f"{where}: the {name} is {kind}, not a function {name}(model, batch).", line)


def check_optimizer(where: str, optimizer: Any) -> None:
    """Refuse what is no function that makes one optimizer."""
    if optimizer is None:
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        found = f"{describe(optimizer)}, but it is made by a function"
        raise UserError(
            f"{where}: the optimizer is {found}, so that a recipe can ask for fused=True.",
            f"Write optimizer=lambda model, **how: torch.optim.{type(optimizer).__name__}"
            "(model.parameters(), **how).",
        )
    if isinstance(optimizer, (list, tuple, dict)):
        found = f"{describe(optimizer)}, but a step has one optimizer, made by a function"
        raise UserError(f"{where}: the optimizer is {found}.", OPTIMIZER)
    if not callable(optimizer) or inspect.isclass(optimizer) or not accepts(optimizer, 1):
        found = describe(optimizer)
        raise UserError(
            f"{where}: the optimizer is {found}, not a function optimizer(model, **how).", OPTIMIZER
        )


def check_tokens(where: str, tokens: Any) -> None:
    """Refuse what is no number of tokens."""
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise UserError(
            f"{where}: tokens_per_sequence must be a whole number above 0, not {tokens!r}.",
            "Give the length of one sequence, or leave it out to count sequences.",
        )


def check_order(where: str, model: Any, batches: Any, loss: Any) -> None:
    """Refuse arguments that stand in each other's place."""
    others = {"batches": batches, "loss": loss}
    if not isinstance(model, nn.Module):
        for name, other in others.items():
            if isinstance(other, nn.Module) and not _is_criterion(other):
                raise _swapped(where, "model", name)
    functions = callable(batches) and callable(loss)
    if functions and not accepts(batches, 1) and accepts(batches, 2) and not accepts(loss, 2):
        raise _swapped(where, "batches", "loss")


def _swapped(where: str, one: str, other: str) -> UserError:
    line = "Name them: model=..., batches=..., loss=..."
    return UserError(f"{where}: {one} and {other} are swapped.", line)


def take_loss(where: str, output: Any) -> StepOutput:
    """Return what the loss function returned as a StepOutput.

    A dict or an object with a `loss`, as Hugging Face models return, is taken as it is.
    """
    if not isinstance(output, (StepOutput, Tensor)):
        output = _loss_of(where, output)
    found = output if isinstance(output, StepOutput) else StepOutput(output)
    _check_scalar(where, found.loss)
    for name, metric in found.metrics.items():
        if not isinstance(metric, Tensor):
            raise UserError(
                f"{where}: the metric {name!r} is {describe(metric)}, not a tensor.",
                "Return the tensor, without .item().",
            )
    return found


def _loss_of(where: str, output: Any) -> Tensor:
    """Find the tensor in what is neither a tensor nor a StepOutput."""
    is_mapping = isinstance(output, Mapping)
    loss = output.get("loss") if is_mapping else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if is_mapping or hasattr(output, "logits"):
        raise UserError(
            f"{where}: the loss returned {describe(output)}, in which there is no loss.",
            "A Hugging Face model computes it from labels: model(**batch, labels=labels).",
        )
    line = "Return the scalar tensor that is to be minimized."
    if output is None:
        line = "End it with: return loss."
    elif isinstance(output, tuple):
        line = "Return the loss alone, or steplab.StepOutput(loss, {'accuracy': accuracy})."
    elif isinstance(output, (int, float)):
        line = "Return the tensor itself, without .item() or float()."
    raise UserError(f"{where}: the loss returned {describe(output)}, not a tensor.", line)


def _check_scalar(where: str, loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise UserError(
            f"{where}: the loss is {describe(loss)}, not a tensor.", "Leave out .item()."
        )
    if loss.ndim != 0:
        raise UserError(
            f"{where}: the loss must be a scalar, but it has shape {tuple(loss.shape)}.",
            "Return loss.mean() or loss.sum().",
        )
    if not loss.is_floating_point():
        line = "Return loss.real or loss.abs()." if loss.is_complex() else "Return a float loss."
        raise UserError(
            f"{where}: the loss is of dtype {str(loss.dtype).removeprefix('torch.')}, "
            "which cannot be minimized by gradients.",
            line,
        )


def no_gradient(model: nn.Module) -> UserError:
    """Return the error for a loss from which no gradient flows back."""
    if not torch.is_grad_enabled():
        return UserError(
            "The step runs where gradients are turned off.",
            "Take the step out of torch.no_grad(), or measure the mode infer.",
        )
    if not any(p.requires_grad for p in model.parameters()):
        return _frozen(model)
    return UserError(
        "The loss depends on no parameter of the model: it was detached on its way.",
        "Leave out .detach(), .data, torch.tensor(loss) and torch.no_grad() in loss and forward.",
    )


def check_trainable(model: nn.Module) -> None:
    """Refuse a model in which there is nothing to train."""
    if not any(p.requires_grad for p in model.parameters()):
        raise _frozen(model)


def check_gradients(model: nn.Module) -> None:
    """Refuse a backward pass that reached no parameter: the loss was computed by another model.

    Gradients may be gone by now where hooks of the parameters have used them.
    """
    for p in model.parameters():
        if p.grad is not None or p._post_accumulate_grad_hooks:
            return
    raise UserError(
        "The backward pass reached no parameter of the model: the loss comes from another one.",
        "Use the model that the loss is given: loss=lambda model, batch: ... model(batch) ...",
    )


def _frozen(model: nn.Module) -> UserError:
    parameters = len(list(model.parameters()))
    if not parameters:
        line = "Assign layers in __init__ (self.layers = nn.ModuleList([...])), not in plain lists."
        return UserError("The model has no parameters, so there is nothing to train.", line)
    return UserError(
        f"All {parameters} parameters of the model are frozen, so there is nothing to train.",
        "Call requires_grad_(True) on those to train, or measure the modes infer and forward.",
    )


@contextlib.contextmanager
def refuse_backward(where: str) -> Iterator[None]:
    """Refuse a backward pass inside: the step runs it, and a second one would add to it."""

    def refuse(tensor: Tensor, *arguments: Any, **options: Any) -> None:
        raise UserError(
            f"{where}: the loss calls backward(), which is the step's part.",
            "Return the loss and leave out backward(), step() and zero_grad(); gradients that the "
            "loss itself needs come from torch.autograd.grad.",
        )

    backward = Tensor.backward
    Tensor.backward = refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.backward = backward  # type: ignore[method-assign]


@contextlib.contextmanager
def explained(
    where: str,
    name: str,
    function: Callable[..., Any],
    model: nn.Module,
    batch: Any = None,
    recipe_dtypes: Collection[torch.dtype] = (),
) -> Iterator[None]:
    """Say what was misunderstood where an error inside the user's function shows it.

    `recipe_dtypes` are those of weights that the recipe has rounded. Any other error passes as it
    is.
    """
    try:
        yield
    except SteplabError:
        raise
    except Exception as error:
        if recipe_dtypes and isinstance(error, RuntimeError) and _is_about_dtypes(error):
            words = " and ".join(str(dtype).removeprefix("torch.") for dtype in recipe_dtypes)
            raise Unsupported(
                f"{where}: with weights in {words}, as the recipe asks, {_failure(name, error)}.",
                "What this model computes wants one dtype: use precision=bf16, which leaves the "
                "weights as they are.",
            ) from error
        advice = _misplaced(error, model, batch)
        if not advice and _takes_model_for_else(error, function, model):
            advice = f"It is called as {SIGNATURES[name]}: its first argument is the model."
        if not advice:
            raise
        raise UserError(f"{where}: {_failure(name, error)}.", advice) from error


def _failure(name: str, error: Exception) -> str:
    """Return what failed with the first sentence of the error, and the line."""
    first = " ".join(str(error).split()).split(". ")[0][:200]
    return f"the {name} fails with {type(error).__name__}: {first} ({error_line(error)})"


def _is_about_dtypes(error: Exception) -> bool:
    return re.search("dtype|scalar type", str(error)) is not None


def _misplaced(error: Exception, model: nn.Module, batch: Any) -> str:
    """Say how the batch does not fit the model, if that is what the error is about; else ""."""
    first = next(model.parameters(), None)
    leaves = tree_leaves(batch)
    if any(type(leaf).__module__ == "numpy" for leaf in leaves) and "numpy" in str(error):
        return "The batch holds numpy arrays: write torch.from_numpy(x).float()."
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if first is None or not isinstance(error, RuntimeError):
        return ""
    away = next((leaf.device for leaf in tensors if leaf.device != first.device), None)
    if away is not None and "device" in str(error):
        there = f"The batch is on {away}, the model on {first.device}"
        return f"{there}: move it with batch.to({str(first.device)!r})."
    dtypes = {leaf.dtype for leaf in tensors if leaf.is_floating_point()} - {first.dtype}
    if dtypes and _is_about_dtypes(error):
        found, own = (str(dtype).removeprefix("torch.") for dtype in (dtypes.pop(), first.dtype))
        line = f"write batch.to(torch.{own})"
        if first.dtype in (torch.bfloat16, torch.float16):
            line = "leave the model in float32 and let the recipe ask for precision=bf16"
        return f"The batch is {found}, the model {own}: {line}."
    return ""


def _takes_model_for_else(error: Exception, function: Callable[..., Any], model: nn.Module) -> bool:
    """Whether lines of the function itself use the model as a tensor, a list of parameters, ..."""
    if not isinstance(error, (TypeError, AttributeError)):
        return False
    kind = re.escape(type(model).__name__)
    if not re.search(rf"'{kind}' object|not {kind}\b", str(error)):
        return False
    own = getattr(inspect.unwrap(function), "__code__", None)
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    theirs = [c for c in codes if user_line(f"{c.co_filename}({c.co_firstlineno}): {c.co_name}")]
    return own is None or not theirs or theirs[-1] is own


def check_made_optimizer(where: str, made: Any, model: nn.Module) -> None:
    """Refuse what is not one optimizer of this model's parameters that steps by itself."""
    if not isinstance(made, torch.optim.Optimizer):
        several = isinstance(made, (list, tuple, dict))
        line = "End it with: return optimizer."
        if several:
            optimizers = [x for x in tree_leaves(made) if isinstance(x, torch.optim.Optimizer)]
            line = ONE_OPTIMIZER if len(optimizers) > 1 else "Return the optimizer alone."
        raise UserError(
            f"{where}: the optimizer function returned {describe(made)}, not one optimizer.", line
        )
    if needs_closure(type(made)):
        raise UserError(
            f"{where}: {type(made).__name__} calls the loss several times within one update "
            "(step(closure)), and a step has one forward pass.",
            NO_CLOSURE,
        )
    _check_parameters(where, made, model)


def needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the update of an optimizer calls the loss by itself, as LBFGS does."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_parameters(where: str, made: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse trainable parameters that no update reaches: their gradients would only pile up."""
    trained = {id(p) for group in made.param_groups for p in group["params"]}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in named if id(p) not in trained]
    if len(missing) == len(named):
        raise UserError(
            f"{where}: the optimizer has none of the model's parameters, but those of another one.",
            "Make it from the model it is given: lambda model, **how: AdamW(model.parameters(), "
            "**how).",
        )
    if missing:
        more = ", ..." if len(missing) > SHOWN_NAMES else ""
        raise UserError(
            f"{where}: {len(missing)} of {len(named)} trainable parameters are not in the optimizer"
            f" ({', '.join(missing[:SHOWN_NAMES])}{more}).",
            "Add them, or freeze them with requires_grad_(False).",
        )


def check_options(where: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse an optimizer function that has no room for what the recipe asks for."""
    if not accepts(make, 1, options):
        asked = ", ".join(f"{name}={value}" for name, value in options.items())
        raise UserError(
            f"{where}: the optimizer is {describe(make)}, but the recipe asks for {asked}.",
            "Pass it on: lambda model, **how: torch.optim.AdamW(model.parameters(), **how).",
        )


def accepts(function: Callable[..., Any], count: int, options: Mapping[str, Any] = {}) -> bool:
    """Whether the function can be called with so many arguments; yes where nobody can know."""
    try:
        inspect.signature(function).bind(*range(count), **options)
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


def describe(value: Any) -> str:
    """Say what a value is, in a few words that fit behind "is"."""
    if value is None:
        return "None"
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        name = "lambda" if value.__name__ == "<lambda>" else value.__name__
        return f"the function {name}{_arguments(value)}"
    if isinstance(value, functools.partial):
        return f"functools.partial of {describe(value.func)}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an object of type {type(value).__name__}"


def _arguments(function: Callable[..., Any]) -> str:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _is_criterion(loss: Any) -> bool:
    """Whether it is a loss of torch, a module or a function, which takes outputs and targets."""
    module = getattr(loss if inspect.isroutine(loss) else type(loss), "__module__", "") or ""
    if isinstance(loss, nn.Module):
        return module == "torch.nn.modules.loss"
    return inspect.isroutine(loss) and module.startswith("torch")


def _criterion(loss: Any) -> str:
    if inspect.isroutine(loss):
        return f"F.{loss.__name__}"
    return f"nn.{type(loss).__name__}()" if _is_criterion(loss) else "criterion"
