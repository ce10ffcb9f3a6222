"""A follower as a process: the lease, the loop, and what it tells the world over HTTP.

| metric (`mtx2vllm_follower_...`) | meaning |
|---|---|
| steps_total{outcome=published, skipped} | converted; left out because a newer one was there |
| ...{outcome=dropped, abandoned} | deleted while it was read; given up (asked to stop, lease lost) |
| ...{outcome=refused, failed} | by the step's own fault; by bad luck, and tried again |
| newest_step, published_step, writing_step | newest in the run, newest version in the root, the one written now |
| conversion_seconds, version_bytes, unchanged_tensors | of the last version |
| holds_lease | 1 for the root's writer, 0 on standby |
| last_beat_seconds | Unix time of the loop's last move |
| peak_rss_bytes | largest resident size so far |
"""

import contextlib
import logging
import signal
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mtx2vllm.converter.conversion import peak_rss
from mtx2vllm.converter.errors import InputError, LostRace, UsageError
from mtx2vllm.converter.fleet.endpoint import Endpoint, Page, health
from mtx2vllm.converter.fleet.follow import Follower, Following, Status, Stop
from mtx2vllm.converter.fleet.follow_lease import RootLease
from mtx2vllm.converter.fleet.follow_steps import find_steps
from mtx2vllm.converter.fleet.places import refuse_overlap, refuse_version
from mtx2vllm.converter.hf_files import CONFIG, find_config

log = logging.getLogger(__name__)

_SILENT_S = 300.0  # a follower that has not moved for so long is not well


def main(chosen: Following, host: str, port: int | None) -> None:
    """Follow until SIGTERM or SIGINT. The first one lets the conversion under way finish within its grace, a second one
    gives it up at once."""
    stop = Stop()
    follower = Follower(chosen, RootLease(chosen.root), stop)

    def on_signal(*_: object) -> None:
        follower.deadline = follower.clock() + (0.0 if stop.is_set() else chosen.grace)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    with contextlib.ExitStack() as stack:
        if port is not None:
            endpoint = stack.enter_context(Endpoint(host, port, pages(follower)))
            log.info("serving /metrics and /healthz on %s:%d", host, endpoint.port, extra={"event": "listening"})
        follow(chosen, stop, follower)


def follow(chosen: Following, stop: Stop, follower: Follower) -> None:
    """Follow until `stop` is set.

    Raises:
        InputError, UsageError: what was asked for can never work: no such config, a root or run that may not be read, a
            root inside the run, a root that is a version.
        LostRace: another follower writes into the root, and `chosen.wait` is false.
    """
    refuse_overlap(chosen.run, chosen.root)
    refuse_version(chosen.root)
    _require_config(chosen)
    while not stop.is_set():
        if _standby(chosen, stop, follower):
            try:
                _work(chosen, stop, follower)
            finally:
                follower.lease.give_back()
    follower.status.state = "stopped"
    log.info("stopped", extra={"event": "stopped"})


def _require_config(chosen: Following) -> None:
    """A config that was given must be one. Where none was, the first checkpoint may bring it; steps that are there
    without one say that none will come."""
    given = chosen.options.hf_config or chosen.options.base
    found = find_steps(chosen.run)
    if given:
        find_config(given, None)
    elif chosen.options.layout == "hf" and found and find_config(None, found[0].location) is None:
        raise InputError(
            f"no {CONFIG} was found in {found[0].location} or above it, and the hf layout needs one; pass --hf-config with "
            f"a Hugging Face {CONFIG}, a directory with one, or a Hub id"
        )


def _standby(chosen: Following, stop: Stop, follower: Follower) -> bool:
    """Wait for the lease. True when it is ours."""
    said = False
    follower.status.state = "standby"
    while not stop.is_set():
        follower.status.beat = follower.clock()
        holder = follower.lease.take()
        if holder is None:
            return True
        if not chosen.wait:
            raise LostRace(f"{chosen.root} has a follower already: {holder}; stop it, or leave out --no-wait")
        if not said:
            log.info("standing by: %s writes into %s", holder, chosen.root, extra={"event": "standby"})
            said = True
        stop.wait(chosen.pause)
    return False


def _work(chosen: Following, stop: Stop, follower: Follower) -> None:
    follower.status.state = "following"
    log.info("following %s into %s", chosen.run, chosen.root, extra={"event": "following"})
    follower.resume()
    failures = 0
    while not stop.is_set() and follower.lease.held():
        try:
            again = follower.turn()
            failures = 0
        except UsageError:
            raise
        except Exception as error:  # a store that is away for a while ends no follower
            again, failures = False, failures + 1
            follower.status.error = str(error)
            if failures in {1, 10, 100} or failures % 1000 == 0:
                log.error("looking failed (%d times in a row): %s", failures, error, extra={"event": "unreadable"})
        if not again:
            stop.wait(min(chosen.pause * 2.0 ** min(failures, 10), max(chosen.pause, 60.0)))
    if not stop.is_set():
        log.error("the lease of %s is lost", chosen.root, extra={"event": "lost"})


def pages(follower: Follower) -> dict[str, Callable[[], Page]]:
    """`/metrics` and `/healthz`."""
    registry = CollectorRegistry()
    registry.register(_Metrics(follower.status))

    def healthz() -> Page:
        status = follower.status
        silent = follower.clock() - status.beat
        facts = {
            "state": status.state, "published": status.published, "newest": status.newest, "writing": status.writing,
            "silent_s": round(silent, 1), "error": status.error,
        }  # fmt: skip
        return health(silent < _SILENT_S, facts)

    return {"/metrics": lambda: Page(generate_latest(registry)), "/healthz": healthz}


class _Metrics:
    """Prometheus' collector protocol over a `Status`."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> list[Metric]:
        """All metrics as they are now."""
        s, name = self._status, "mtx2vllm_follower_"
        steps = CounterMetricFamily(name + "steps", "Steps of the run, by what became of them.", labels=["outcome"])
        for outcome, count in s.counts.items():
            steps.add_metric([outcome], count)
        gauges = {
            "newest_step": (s.newest, "Newest step in the run."),
            "published_step": (s.published, "Newest version in the root."),
            "writing_step": (s.writing, "Version that is written now."),
            "conversion_seconds": (s.seconds, "How long the last conversion took."),
            "version_bytes": (s.nbytes, "Weights in the last version."),
            "unchanged_tensors": (s.unchanged, "Tensors of the last version that equal the version before."),
            "holds_lease": (int(s.state == "following"), "1 while this follower is the root's writer."),
            "last_beat_seconds": (s.beat, "When the loop last moved (Unix time)."),
            "peak_rss_bytes": (peak_rss(), "Largest resident size of the process so far."),
        }
        shown = [GaugeMetricFamily(name + k, text, value=v) for k, (v, text) in gauges.items() if v is not None]
        return [steps, *shown]
