"""A stand-in for the engine's own canonical loader, with the contract published for it (tpu-inference pull request 3477):
`canonical_weight_specs(state)` and `load_canonical_weights(weights, state)`, in place into `state`, tensor by tensor."""

from collections.abc import Iterable
from typing import Any


class Native:
    def __init__(self, engine: Any) -> None:
        self._live, self._units = engine._live, engine._units
        self.fail_at: int | None = None
        self.calls = 0

    def specs(self, state: Any) -> dict[str, Any]:
        import jax

        assert state is self._live.runner.state
        specs = {name: spec for unit in self._units for name, spec in unit.specs.items()}
        return {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs.items()}

    def load(self, weights: Iterable[tuple[str, Any]], state: Any) -> None:
        from mtx2vllm.reload.engines.live import build, placement, put

        assert state is self._live.runner.state
        self.calls += 1
        now = self._live.arrays()
        for i, (name, array) in enumerate(weights):
            if i == self.fail_at:
                raise RuntimeError("the native loader failed")
            unit = next(unit for unit in self._units if name in unit.specs)
            for target, value in build(unit, {name: array}).items():
                self._live.install(target, put(value, placement(now[target])))
