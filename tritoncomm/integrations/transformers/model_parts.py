"""Parts of a model of transformers that are right, wrong or unknown where each rank holds a shard of the sequence.

A model is judged by what it contains: the kinds of layers in its config, flags that transformers sets, its modules, and
the source of the file that defines it. There is no list of models.
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal

from torch import nn

from tritoncomm.integrations.transformers import recurrences, rotary_tables
from tritoncomm.integrations.transformers.sources import (
    REGISTRY,
    calls_registry,
    files_of,
    masks_by_name,
    source_of,
    tree_of,
)

__all__ = [
    "PROMPTS", "ROUTER_LOSS", "callers", "counts_unpadded", "has_attention", "language_model_path", "language_parts",
    "learns_prompts", "needs_switch", "outermost", "outputs_of", "running_model", "text_config", "towers",
    "unknown_part", "wrong_addition", "wrong_attention", "wrong_part",
]  # fmt: skip

_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
_BY_POSITION = {"mlp", "moe", "sparse", "dense"}  # kinds of MLP, which work on positions one by one
_OWN_POSITIONS = "create_position_ids_from_input_ids"
_POSITIONS = re.compile("posit|rotary|rope|wpe|alibi|relative", re.IGNORECASE)  # names of tables of positions
PROMPTS = "prompt learning puts virtual tokens before every shard; use adapters such as LoRA"
ROUTER_LOSS = "every rank would add the router's auxiliary loss, of its own tokens"
# Names of the outputs that a forward is annotated with: one result for each position, and one for a whole sequence.
_BY_TOKEN = re.compile(
    r"\w*(CausalLM|MaskedLM|Seq2SeqLM|DecoderLM|LMHeadModel)Output\w*|\w*TokenClassif\w*Output"
    r"|\w*QuestionAnswering(Model|Simple)Output|(Base|Moe|Seq2Seq)ModelOutput\w*|\w+ModelOutputWithPast"
)
_BY_SEQUENCE = re.compile(r"\w*(SequenceClassif|MultipleChoice|NextSentence|PreTraining|DoubleHeads)\w*")


def wrong_part(model: Any, attention: str, sharded: bool, sharded_layers: Collection[nn.Module] = ()) -> str | None:
    """Return why a model would give wrong numbers, or None.

    Args:
        sharded: whether there are several ranks.
        sharded_layers: recurrent layers that compute over shards.
    """
    if sharded and (problem := next(filter(None, map(_wrong_adapters, model.modules())), None)):
        return problem
    model = outermost(model.modules()) or model
    config = text_config(model.config)
    parts = language_parts(model)
    classes = [type(module) for module in parts]
    has_sdpa = getattr(_language_model(model), "_supports_sdpa", True)
    if attention == "sdpa" and not has_sdpa and calls_registry(classes):
        return "transformers says that it does not support 'sdpa'"
    if problem := _wrong_source(classes):
        return problem
    if not sharded:
        return None
    if problem := recurrences.wrong_layer(sharded_layers) or _wrong_kinds(config, model, sharded_layers):
        return problem
    if getattr(model, "_is_stateful", False) and not sharded_layers:
        return "it has a state that runs along the sequence, and would stop at the end of every shard"
    if getattr(config, "output_router_logits", False) or getattr(model.config, "output_router_logits", False):
        return f"output_router_logits: {ROUTER_LOSS}; set it to False"
    if problem := rotary_tables.wrong_table(parts) or _wrong_head(model) or _wrong_positions(model):
        return problem
    if problem := next(filter(None, map(_wrong_draws, parts)), None):
        return problem
    right = {id(part) for layer in sharded_layers for part in layer.modules()}
    mixers = sorted({type(module).__name__ for module in _mixers(parts) if id(module) not in right})
    if mixers and not _layer_types(config):  # layers of a config with types were judged above, by _wrong_kinds
        return f"{', '.join(mixers)} in its layers mixes positions, and would stop at the end of every shard"
    return None


def wrong_addition(model: Any) -> str | None:
    """Return why something that can be added to a model of transformers after ``switch`` is wrong over shards."""
    return _wrong_adapters(model) or _wrong_draws(model) or _wrong_draws(model.get_input_embeddings())


def _wrong_adapters(module: nn.Module) -> str | None:
    """Return the reason why adapters of peft in a module are wrong over shards, or None."""
    if learns_prompts(module):
        return PROMPTS
    if _reads_sequence(module):
        return "its adapters of peft look at the whole sequence (aLoRA, Lily), and would see a shard; use LoRA"
    return None


def _wrong_draws(module: Any) -> str | None:
    """Return the reason why random numbers that a module draws are wrong over shards, or None."""
    if getattr(module, "layerdrop", 0):
        return "layerdrop: every rank would draw for itself which layers run; set it to 0"
    if getattr(module, "neftune_noise_alpha", None):
        return "the noise of NEFTune is scaled by the length, and equal on all shards; turn it off"
    return None


def learns_prompts(module: nn.Module) -> bool:
    """Whether a module is a model of peft with virtual tokens."""
    configs = getattr(module, "peft_config", None)
    return isinstance(configs, Mapping) and any(
        getattr(config, "is_prompt_learning", False) for config in configs.values()
    )


def _reads_sequence(module: nn.Module) -> bool:
    """Whether a module has adapters that depend on other positions: invocation tokens, or a router over all."""
    configs = getattr(module, "peft_config", None)
    return isinstance(configs, Mapping) and any(
        getattr(config, "alora_invocation_tokens", None) or "LILY" in str(getattr(config, "peft_type", ""))
        for config in configs.values()
    )


def unknown_part(model: Any) -> str | None:
    """Return the reason why nobody knows whether a model is right over shards: its head, or its layers; or None."""
    names = outputs_of(outermost(model.modules()) or model)
    if not any(_BY_TOKEN.fullmatch(name) for name in names):
        outputs = " or ".join(names) or "nothing that its annotation names"
        return f"its forward returns {outputs}, of which it is not known that it has one result for each position"
    if _layer_types(text_config(model.config)):
        return None
    # Only attention that calls transformers' registry may mix positions, and the source has to show it.
    if not calls_registry([type(module) for module in language_parts(model)]):
        return f"no layer_types are in its config, and its code does not call {REGISTRY}"
    return None


def wrong_attention(module: Any, sharded: bool) -> str | None:
    """Return why the model of an attention module would give wrong numbers, by its config and file, or None."""
    config = getattr(module, "config", None)
    problem = _wrong_source([type(module)])
    if problem is None and sharded and config is not None:
        problem = _wrong_kinds(text_config(config), module, ())
    if problem is None and sharded:
        classes = vars(sys.modules.get(type(module).__module__, ModuleType(""))).values()
        if any(isinstance(kind, type) and vars(kind).get("_is_stateful") is True for kind in classes):
            problem = "its model has a state that runs along the sequence"
    return problem


def text_config(config: Any) -> Any:
    """Return the config of the text model in a config of several models, or the config itself."""
    get = getattr(config, "get_text_config", None)
    return config if get is None else get(decoder=True)


def _layer_types(config: Any) -> set[str]:
    """Return the kinds of layers in a config, its ``layer_types``; an empty set where it has none."""
    return {str(kind) for kind in getattr(config, "layer_types", None) or ()}


def _wrong_kinds(config: Any, model: nn.Module, sharded_layers: Collection[nn.Module]) -> str | None:
    """Return the reason why a kind of layer in a config is not known to be right over shards; None without one.

    Args:
        sharded_layers: recurrent layers that compute over shards; a layer with one of them is right whatever its kind.
    """
    kinds = getattr(config, "layer_types", None) or ()
    unknown = _layer_types(config) - _ATTENTION - _BY_POSITION
    sharded_ids = set(map(id, sharded_layers))
    if unknown and sharded_ids:
        for layers in model.modules():
            if isinstance(layers, nn.ModuleList) and len(layers) == len(kinds):
                has_sharded = [not sharded_ids.isdisjoint(map(id, layer.modules())) for layer in layers]
                if any(has_sharded):  # these are the layers of the config, in its order
                    unknown &= {kind for kind, is_known in zip(kinds, has_sharded, strict=True) if not is_known}
    if not unknown:
        return None
    names = ", ".join(sorted(unknown))
    return f"its layers of the kind {names} are not known to be right over shards of the sequence"


def _wrong_source(kinds: list[type]) -> str | None:
    """Return the reason why the files of some classes are wrong over shards, and at one rank too; None without one."""
    for name in sorted({name for kind in set(kinds) for name in files_of(kind)}):
        source = source_of(name)
        if f"def {_OWN_POSITIONS}" in source:
            return f"it numbers the positions itself ({_OWN_POSITIONS}), from the ids of a shard"
        if "_attn_implementation" in source and masks_by_name(name):
            return "it makes a mask only for implementations that it knows by name, and would run without"
    return None


def _wrong_head(model: Any) -> str | None:
    """Return the reason why a model that gives one result for a whole sequence is wrong over shards, or None."""
    for name in outputs_of(model):
        if _BY_SEQUENCE.fullmatch(name):
            return f"it returns {name}, one result for a sequence, and would make one of each shard"
        if "Pool" in name and getattr(model, "pooler", model) is not None:
            return f"it returns {name}, and its pooler would read a position of each shard; build it without one"
    return None


def outputs_of(model: Any) -> list[str]:
    """Return the names of the classes of outputs that a forward is annotated to return."""
    annotation = inspect.signature(type(model).forward).return_annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.findall(r"\w*Output\w*", text)


def outermost(modules: Iterable[Any]) -> Any | None:
    """Return the first model of transformers: behind a wrapper, as peft's is one; None without any."""
    pretrained_model = importlib.import_module("transformers").PreTrainedModel
    return next((module for module in modules if isinstance(module, pretrained_model)), None)


def running_model() -> Any | None:
    """Return the outermost model of transformers whose forward is running in this thread; None outside of one."""
    owners = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward":  # a frame keeps the locals that it was asked for until it ends
            owners.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return outermost(reversed(owners))


def language_parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model but for those of its towers, which text does not enter."""
    excluded = {id(module) for tower in towers(model) for module in tower.modules()}
    return [module for module in model.modules() if id(module) not in excluded]


def towers(model: nn.Module) -> list[nn.Module]:
    """Return the models of images or audio inside of a model, which take no tokens."""
    pretrained_model = importlib.import_module("transformers").PreTrainedModel
    outer: Any = outermost(model.modules())
    if outer is None or getattr(outer.config, "is_encoder_decoder", False):
        return []
    language_model = _language_model(outer)
    return [
        module
        for module in outer.modules()
        if isinstance(module, pretrained_model)
        and not any(part is language_model for part in module.modules())
        and not {"input_ids", "inputs_embeds"} & set(inspect.signature(type(module).forward).parameters)
    ]


def _language_model(outer: Any) -> Any:
    """Return the model that embedded tokens are handed to; the model itself where nothing says which.

    Tried in this order: ``get_decoder``; a model that the forward calls with ``inputs_embeds``; the first one inside
    that takes ``input_ids``, as in a user's module around a model.
    """
    pretrained_model = importlib.import_module("transformers").PreTrainedModel
    inner = {id(module) for module in outer.modules() if isinstance(module, pretrained_model) and module is not outer}
    decoder = outer.get_decoder() if hasattr(outer, "get_decoder") else outer
    if id(decoder) in inner:
        return decoder
    for owner in (outer, getattr(outer, "base_model", outer)):
        for name in _embedding_callees(inspect.unwrap(type(owner).forward)):  # attributes that it calls
            if id(getattr(owner, name, None)) in inner:
                return getattr(owner, name)
    takes_tokens = (
        module
        for module in outer.modules()
        if id(module) in inner and "input_ids" in inspect.signature(type(module).forward).parameters
    )
    language_model = next(takes_tokens, None)
    return outer if language_model is None else _language_model(language_model)


def language_model_path(outer: Any) -> str | None:
    """Return the path of the language model that a model around it calls with ``inputs_embeds=``; None without one.

    It is the first callee with a config of its own.
    """
    if getattr(outer.config, "is_encoder_decoder", False):  # whose encoder and decoder both take embeddings
        return None
    path: list[str] = []
    model = outer
    while callee := _embedding_callee(model):
        path.append(callee)
        model = model.get_submodule(callee)
        if model.config is not outer.config:
            return ".".join(path)
    return None


def _embedding_callee(model: Any) -> str | None:
    """Return the path of the model of transformers in a model that its forward calls with ``inputs_embeds=``."""
    pretrained_model = importlib.import_module("transformers").PreTrainedModel
    for name in _embedding_callees(inspect.unwrap(type(model).forward)):
        part = getattr(model, name, None)
        for path, module in part.named_modules(prefix=name) if isinstance(part, nn.Module) else ():
            if isinstance(module, pretrained_model):  # a wrapper of peft may be around it
                return path
    return None


@lru_cache(maxsize=256)
def _embedding_callees(forward: Any) -> tuple[str, ...]:
    """Return the attributes ``x`` that a forward calls as ``self.x(..., inputs_embeds=...)``."""
    return tuple(
        node.func.attr
        for node in ast.walk(tree_of(forward))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
        and any(keyword.arg == "inputs_embeds" for keyword in node.keywords)
    )


def _wrong_positions(model: nn.Module) -> str | None:
    """Return the reason why a model would number the positions of a shard, or None.

    A model without positions may ignore ``position_ids``, as Mamba does.
    """
    language_model = _language_model(model)
    if "position_ids" in inspect.signature(type(language_model).forward).parameters:
        return None
    parts = set(map(id, language_parts(model)))
    modules = [
        (name, type(part).__name__) for name, part in language_model.named_modules() if name and id(part) in parts
    ]
    tensors = [(name, "") for name, _ in (*language_model.named_parameters(), *language_model.named_buffers())]
    for name, kind in (*modules, *tensors):
        if _POSITIONS.search(name.rpartition(".")[2]) or _POSITIONS.search(kind):
            label = type(language_model).__name__
            return f"{label} takes no position_ids, and its {name} would number the positions of a shard from 0 on"
    return None


def counts_unpadded(model: nn.Module) -> Literal["product", "other"] | None:
    """Return the way by which a model without ``position_ids`` numbers positions by its padding mask, or None.

    ``"product"`` is ``mask.cumsum(1) * mask - 1``, as OPT does.
    """
    outer = outermost(model.modules())
    return None if outer is None else _counts_unpadded(type(_language_model(outer)))


@lru_cache(maxsize=256)
def _counts_unpadded(kind: type) -> Literal["product", "other"] | None:
    """Return the way by which a forward sums up a mask where it has no ``position_ids``."""
    for node in ast.walk(tree_of(inspect.unwrap(kind.forward))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "position_ids is None":
            text = "\n".join(map(ast.unparse, node.body))
            if "cumsum" in text:
                return "product" if re.search(r"\(position_ids \* \w+ - 1\)", text) else "other"
    return None


def callers(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield the modules around a model whose forwards run in this thread, with their arguments and local names."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward":
            names = frame.f_locals
            module = names.get("self")
            if isinstance(module, nn.Module) and any(part is model for part in module.modules()):
                keywords = names.get("kwargs")
                yield module, {**names, **(keywords if isinstance(keywords, Mapping) else {})}
        frame = frame.f_back


def needs_switch(model: nn.Module) -> str | None:
    """Return the reason why a model needs the hooks of ``switch`` over shards, or None."""
    if rotary_tables.chosen_by_largest(language_parts(model)):
        return "its rotary tables are chosen by the largest position; give the model to switch()"
    if counts_unpadded(model) is not None:
        return "it numbers positions by its padding mask; give the model to switch()"
    return None


def has_attention(model: nn.Module) -> bool:
    """Whether a model has attention that goes through transformers' registry."""
    return calls_registry([type(module) for module in model.modules()])


def _mixers(parts: list[nn.Module]) -> Iterator[nn.Module]:
    """Yield convolutions and recurrent modules in the layers of the text model: lists with a numbered attention."""
    for layers in parts:
        if not isinstance(layers, nn.ModuleList) or not any(
            hasattr(module, "layer_idx") for module in layers.modules()
        ):
            continue
        for module in layers.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase):
                yield module
