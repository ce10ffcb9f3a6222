"""What an agent tells Prometheus, and the pages /metrics, /healthz and /readyz.

| metric | meaning |
|---|---|
| mtx2vllm:reload_{detect,verify,stage,prepare,pause,resume}_seconds | a reload's phases; detect: from publication until seen |
| mtx2vllm:reloads_total{mode} | swaps that succeeded |
| mtx2vllm:reload_failures_total{reason} | versions that were not loaded |
| mtx2vllm:reload_bytes_total, mtx2vllm:reload_tensors_total{kind} | what was staged; tensors changed and unchanged |
| mtx2vllm:loaded_version, mtx2vllm:wanted_version | steps; -1: none |
| mtx2vllm:ready | 1 when a version is loaded and the engine is sound |
| mtx2vllm:quarantined_versions | versions that failed and wait |
| mtx2vllm:watch_fallbacks_total{reason} | inotify was not to be had |
| mtx2vllm:look_failures_total, mtx2vllm:last_look_timestamp_seconds | looking at the root |
| mtx2vllm:lease_writes_total | writes of this replica's lease |
"""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mtx2vllm.converter.fleet.endpoint import Page, health

_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PHASES = ("detect", "verify", "stage", "prepare", "pause", "resume")


class Metrics:
    """One agent's metrics, in a registry of its own so that several agents of a process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.phases = {
            name: Histogram(
                f"mtx2vllm:reload_{name}_seconds", f"Seconds of {name}", buckets=_BUCKETS, registry=registry
            )
            for name in PHASES
        }
        self.reloads = Counter("mtx2vllm:reloads", "Versions loaded", ["mode"], registry=registry)
        self.failures = Counter("mtx2vllm:reload_failures", "Versions not loaded", ["reason"], registry=registry)
        self.bytes = Counter("mtx2vllm:reload_bytes", "Bytes staged", registry=registry)
        self.tensors = Counter("mtx2vllm:reload_tensors", "Tensors by what became of them", ["kind"], registry=registry)
        self.loaded = Gauge("mtx2vllm:loaded_version", "Step of the loaded version, -1: none", registry=registry)
        self.wanted = Gauge("mtx2vllm:wanted_version", "Step of the wanted version, -1: none", registry=registry)
        self.ready = Gauge("mtx2vllm:ready", "1 when a version is loaded", registry=registry)
        self.quarantined = Gauge("mtx2vllm:quarantined_versions", "Versions that failed and wait", registry=registry)
        self.fallbacks = Counter(
            "mtx2vllm:watch_fallbacks", "Falls from events to polling", ["reason"], registry=registry
        )
        self.look_failures = Counter("mtx2vllm:look_failures", "Looks at the root that failed", registry=registry)
        self.last_look = Gauge("mtx2vllm:last_look_timestamp_seconds", "Last look at the root", registry=registry)
        self.lease_writes = Counter("mtx2vllm:lease_writes", "Writes of the lease", registry=registry)
        self.loaded.set(-1)
        self.wanted.set(-1)

    def observe(self, seconds: Mapping[str, float]) -> None:
        """Record phases by name."""
        for name, value in seconds.items():
            self.phases[name].observe(max(value, 0.0))  # two clocks may disagree on `detect`

    def page(self) -> Page:
        """All of it in Prometheus' text format."""
        return Page(generate_latest(self.registry))


Facts = Callable[[], Mapping[str, object]]


def pages(
    metrics: Metrics, live: Callable[[], bool], ready: Callable[[], bool], facts: Facts
) -> dict[str, Callable[[], Page]]:
    """The pages of an agent: /healthz says whether engine and agent run, /readyz whether a version is loaded."""
    return {
        "/metrics": metrics.page,
        "/healthz": lambda: health(live(), facts()),
        "/readyz": lambda: health(ready(), facts()),
    }
