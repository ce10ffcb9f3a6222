"""What a scenario can look at. Each check returns facts; the tests judge them."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from .canonical import Tensors
from .scenario import PROMPTS, Session, generated, state_of
from .variants import directory


def exact(session: Session) -> dict[str, Any]:
    """Push A over random weights, and compare with an engine that loaded A from its Hugging Face directory."""
    specs = session.engine.specs()
    before = state_of(session.llm)
    session.swap(session.a, 1)
    mine, tokens = state_of(session.llm), generated(session.llm)
    cold = session.cold()
    theirs, expected = state_of(cold), generated(cold)
    return {
        "plan": _planned(session.family),
        "specs": {name: [list(spec.shape), str(spec.dtype)] for name, spec in specs.items()},
        "canonical": {name: [list(x.shape), str(x.dtype)] for name, x in session.a.items()},
        "untouched": sorted(session.engine.untouched()),
        "entries": len(theirs),
        "identical": sum(mine.get(name) == entry for name, entry in theirs.items()),
        "differing": [name for name, entry in theirs.items() if mine.get(name) != entry],
        "unchanged_by_swap": [name for name, entry in theirs.items() if before[name] == entry],
        "tokens_equal": tokens[0] == expected[0],
        "logprobs_equal": tokens[1] == expected[1],
        "distinct_tokens": len({t for answer in tokens[0] for t in answer}),
    }


def _planned(family: str) -> dict[str, list[Any]]:
    """What the converter would write for this model, by its config alone."""
    from mtx2vllm.converter.job import plan

    tensors = plan(str(directory(family)), layout="canonical").tensors
    return {tensor.name: [list(tensor.shape), tensor.dtype] for tensor in tensors}


def round_trips(session: Session) -> dict[str, Any]:
    """A -> B -> A in every combination of ways, by digest of the whole state and by log-probabilities."""
    session.swap(session.a, 1)
    a, answer = session.engine.digest(), generated(session.llm)
    facts: dict[str, Any] = {}
    for there, back in (("double", "inplace"), ("inplace", "double"), ("inplace", "inplace")):
        session.swap(session.b, 2, mode=there, undo=session.a)
        b = session.engine.digest()
        other_answer = generated(session.llm)
        session.swap(session.a, 3, mode=back, undo=session.b if there == "inplace" else None)
        facts[f"{there}-{back}"] = {
            "b_differs": b != a,
            "b_answers_differ": other_answer[1] != answer[1],
            "a_again": session.engine.digest() == a,
            "a_answers_again": generated(session.llm) == answer,
            "b": b,
        }
    return facts


def partial(session: Session) -> dict[str, Any]:
    """Swap tensor by tensor, each alone, from A to B: the end is B, whatever is processed together."""
    session.swap(session.b, 1)
    b = session.engine.digest()
    session.swap(session.a, 2)
    for i, name in enumerate(session.a):
        session.swap({name: session.b[name]}, 3 + i, mode=("double", "inplace")[i % 2])
    return {"b_again": session.engine.digest() == b, "swaps": len(session.a)}


class _Failing(Mapping[str, Any]):
    """Weights of which one tensor cannot be read."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        self._tensors, self._name = tensors, name

    def __getitem__(self, name: str) -> Any:
        if name == self._name and self.armed:
            raise OSError("the disk went away")
        return self._tensors[name]

    armed = False

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def faults(session: Session, every: int = 1) -> dict[str, Any]:
    """A fault at each `every`-th place of a swap from A to B, in reading and in writing, both ways."""
    session.swap(session.a, 1)
    a, answer = session.engine.digest(), generated(session.llm)
    count = {"double": 0, "inplace": 0}
    wrong: list[str] = []
    for mode in count:
        for kind in ("read", "write"):
            for at in range(0, _places(session, kind, mode), every):
                error = _swap_with_fault(session, mode, kind, at)
                count[mode] += 1
                if error != "SwapFailed" or session.engine.digest() != a:
                    wrong.append(f"{mode} {kind} {at}: {error}")
    weight_version = session.llm.llm_engine.get_weight_version()
    return {"faults": count, "wrong": wrong, "answers": generated(session.llm) == answer, "version": weight_version}


def faults_sampled(session: Session) -> dict[str, Any]:
    return faults(session, every=7)


def _places(session: Session, kind: str, mode: str) -> int:
    """How many reads, or how many writes into the model, a whole swap does."""
    if kind == "read":
        return len(session.a)
    counted = [0]
    with _counting(session, mode, lambda: counted.__setitem__(0, counted[0] + 1)):
        session.swap(session.a, 1, mode=mode)
    return counted[0]


class _counting:  # noqa: N801
    """Calls `hook` before each array is written into the model: installed (double) or copied (in place)."""

    def __init__(self, session: Session, mode: str, hook: Any) -> None:
        from mtx2vllm.reload.engines import exchange

        live = session.engine._live
        self._owner, self._name = (live, "install") if mode == "double" else (exchange, "put")
        self._original, self._hook = getattr(self._owner, self._name), hook

    def __enter__(self) -> None:
        def hooked(*args: Any) -> Any:
            self._hook()
            return self._original(*args)

        setattr(self._owner, self._name, hooked)

    def __exit__(self, *_: Any) -> None:
        setattr(self._owner, self._name, self._original)


def _swap_with_fault(session: Session, mode: str, kind: str, at: int) -> str:
    """The name of what a swap to B with a fault at its `at`-th read or write raises."""
    undo = session.a if at % 2 else None
    weights: Any = session.b
    left = [at]

    def hook() -> None:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("the device went away")

    try:
        if kind == "read":
            weights = _Failing(session.b, list(session.b)[at])
            session.engine._check(_change(weights, mode, undo))
            weights.armed = True
            session.engine._check = lambda _: None
            session.swap(weights, 2, mode=mode, undo=undo)
        else:
            with _counting(session, mode, hook):
                session.swap(weights, 2, mode=mode, undo=undo)
    except Exception as error:
        return type(error).__name__
    finally:
        vars(session.engine).pop("_check", None)
    return "nothing"


def _change(weights: Any, mode: str, undo: Any) -> Any:
    from mtx2vllm.reload.engine import Change

    return Change(2, weights, mode=mode, undo=undo)  # type: ignore[arg-type]


def refusals(session: Session) -> dict[str, Any]:
    """Weights that do not fit are refused, by name, before anything is touched."""
    session.swap(session.a, 1)
    before, first = session.engine.digest(), next(iter(session.a))
    cases = {
        "unknown": {"no.such.tensor": session.a[first]},
        "shape": {first: session.a[first][:-1]},
        "dtype": {first: session.a[first].astype("float32")},
    }
    messages = {}
    for name, weights in cases.items():
        try:
            session.swap(weights, 2)
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return {"messages": messages, "first": first, "unchanged": session.engine.digest() == before}


def device_memory(session: Session) -> dict[str, Any]:
    """Bytes of live arrays during an in-place swap, over what they were when it began."""
    import jax

    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    session.swap(session.a, 1)
    peak, base = [0], [0]

    def hook() -> None:
        if not base[0]:
            base[0] = live()
        peak[0] = max(peak[0], live())

    with _counting(session, "inplace", hook):
        session.swap(session.b, 2, mode="inplace", undo=session.a)
    layers: dict[str, int] = {}
    for name, array in session.engine._live.arrays().items():
        head, found, tail = name.partition(".layers.")
        layers[head + found + tail.split(".")[0] if found else name] = (
            layers.get(head + found + tail.split(".")[0] if found else name, 0) + array.nbytes
        )
    return {"transient": peak[0] - base[0], "largest_layer": max(layers.values()), "model": sum(layers.values())}


def in_flight(session: Session) -> dict[str, Any]:
    """Swap while requests run: every span of a request's versions is what that version continues with."""
    from vllm import SamplingParams, TokensPrompt

    from mtx2vllm.reload.engine import SwapFailed

    facts: dict[str, Any] = {"async_scheduling": session.llm.llm_engine.engine_core.engine_core.batch_queue is not None}
    engine = session.llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    session.swap(session.a, 10)
    for requests in ("preempt", "drain", "keep"):
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"{requests}{i}", TokensPrompt(prompt_token_ids=prompt), sampling)
        finished: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            finished |= {out.request_id: out for out in engine.step() if out.finished}
            steps += 1
            if steps == 12:
                try:
                    session.swap(session.b, 11, requests=requests)
                except SwapFailed as error:
                    facts[f"{requests}_refused"] = str(error)
        if f"{requests}_refused" in facts:
            continue
        spans = [_spans(finished[f"{requests}{i}"]) for i in range(len(PROMPTS))]
        facts[requests] = {"spans": [[(v, len(t)) for v, t in span] for span in spans]}
        if requests != "keep":
            facts[requests]["continues"] = _continues(session, spans)
        session.swap(session.a, 10)
    facts["cached"] = _cached_tokens(session)
    return facts


def _spans(output: Any) -> list[tuple[str, list[int]]]:
    """[(version, tokens)] of a finished request."""
    tokens = list(output.outputs[0].token_ids)
    spans = (
        output.outputs[0].weight_versions if hasattr(output.outputs[0], "weight_versions") else output.weight_versions
    )
    starts = [span.start for span in spans] + [len(tokens)]
    return [(span.version, tokens[lo:hi]) for span, lo, hi in zip(spans, starts, starts[1:], strict=False)]


def _continues(session: Session, requests: list[list[tuple[str, list[int]]]]) -> list[bool]:
    """For each request: whether each of its spans is what that version, loaded afresh and with empty caches, says
    after the tokens before it. The requests run together, as they did, so that batches have the same shapes."""
    from .start import greedy

    before = [list(prompt) for prompt in PROMPTS]
    good = [True] * len(requests)
    for i, (version, _) in enumerate(requests[0]):
        session.swap({"10": session.a, "11": session.b}[version], int(version))
        # A prompt that came in chunks has begun later, so that its spans lie elsewhere.
        answers = greedy(session.llm, before, max(len(spans[i][1]) for spans in requests))
        for j, spans in enumerate(requests):
            tokens = spans[i][1]
            good[j] &= answers[j][0][: len(tokens)] == tokens
            before[j] += tokens
    return good


def _cached_tokens(session: Session) -> dict[str, Any]:
    """Tokens of a repeated prompt that came from the prefix cache, before and after a swap."""
    from vllm import SamplingParams, TokensPrompt

    def cached() -> int:
        out = session.llm.generate(
            [TokensPrompt(prompt_token_ids=list(range(40, 100)))], SamplingParams(max_tokens=1), use_tqdm=False
        )
        return int(out[0].num_cached_tokens or 0)

    cached()
    warm = cached()
    session.swap(session.b, 11)
    return {"warm": warm, "after_swap": cached()}


def concurrent(session: Session) -> dict[str, Any]:
    """Swaps from another thread, one after another, while this one generates without a pause."""
    session.swap(session.a, 1)
    errors: list[str] = []
    done = threading.Event()
    swaps = [0]

    def swapper() -> None:
        try:
            while not done.is_set():
                session.swap(
                    (session.a, session.b)[swaps[0] % 2], 100 + swaps[0], mode=("double", "inplace")[swaps[0] % 2]
                )
                swaps[0] += 1
        except Exception as error:
            errors.append(repr(error))

    thread = threading.Thread(target=swapper)
    thread.start()
    rounds = [len(tokens) for _ in range(6) for tokens in generated(session.llm)[0]]
    done.set()
    thread.join(60)
    return {"swaps": swaps[0], "errors": errors, "answers": rounds, "stopped": not thread.is_alive()}


def native(session: Session) -> dict[str, Any]:
    """The runner's own loader is used where there is one: here a stand-in that keeps the published contract."""
    from mtx2vllm.reload.engines import tpu_inference

    from .native import Native

    session.swap(session.b, 1)
    b = session.engine.digest()
    session.swap(session.a, 2)
    a = session.engine.digest()
    loader = Native(session.engine)
    model = session.engine._live.runner.model
    model.load_canonical_weights, model.canonical_weight_specs = loader.load, loader.specs
    engine = tpu_inference.TpuInference(session.llm.llm_engine.engine_core.engine_core)
    session.engine = engine
    facts: dict[str, Any] = {"specs": len(engine.specs()), "tensors": len(session.a)}
    for mode in ("double", "inplace"):
        loader.fail_at = len(session.a) // 2
        try:
            session.swap(session.b, 3, mode=mode)
        except Exception as error:
            facts[f"{mode}_fault"] = type(error).__name__
        facts[f"{mode}_restored"] = engine.digest() == a
        loader.fail_at = None
        session.swap(session.b, 4, mode=mode)
        facts[f"{mode}_b"] = engine.digest() == b
        session.swap(session.a, 5, mode=mode)
        facts[f"{mode}_a"] = engine.digest() == a
    facts["calls"] = loader.calls
    return facts
