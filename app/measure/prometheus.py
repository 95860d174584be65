"""The app's Prometheus metrics, on a registry of their own.

vLLM clears the default registry when a second engine starts; nothing here touches it. Every series
carries ``source`` ("live" or "scripted"), so that scripted figures can't pass for measured ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.engines.lane import Fleet, LaneName, Step
from app.measure.memory import MemorySampler
from app.race.run import LaneRun, Run

STATES = ("waiting", "starting", "warming", "ready", "failed", "stopped")
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)
STEP_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
SPEEDUP_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)


class Prometheus:
    """Counts what races do, and reads states and memory when scraped."""

    def __init__(self, fleet: Fleet, sampler: MemorySampler) -> None:
        self.registry = CollectorRegistry()
        self._source = fleet.source

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"specduel_{name}", text, ("source", *labels), registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"specduel_{name}", text, ("source", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"specduel_{name}", text, ("source", *labels), buckets=buckets, registry=self.registry)

        self._runs = counter("runs", "Runs that ended, by mode and how they ended.", "mode", "status")
        self._tokens = counter("output_tokens", "Output tokens, counted by id.", "lane")
        self._steps = counter("steps", "Verify passes of the target.", "lane")
        self._decode_tokens = counter("decode_tokens", "Output tokens after each run's first step.", "lane")
        self._decode_steps = counter("decode_steps", "Steps after each run's first.", "lane")
        self._decode_seconds = counter("decode_seconds", "Time between the first step and the last, summed.", "lane")
        self._drafted = counter("drafted_tokens", "Tokens that the draft proposed.", "lane")
        self._accepted = counter("accepted_tokens", "Drafted tokens that the target accepted.", "lane")
        self._drafts = counter("drafts", "Steps in which something was drafted.", "lane")
        self._accepted_at = counter(
            "accepted_tokens_at_position", "Drafts accepted up to and with this position (from 0).", "lane", "position"
        )
        self._failures = counter("lane_failures", "Runs in which a lane failed.", "lane")
        self._ttft = histogram("ttft_seconds", "Time to first token.", TTFT_BUCKETS_S, "lane")
        self._step_time = histogram("step_seconds", "Time between decode steps.", STEP_BUCKETS_S, "lane")
        self._tok_s = gauge("decode_tokens_per_second", "Decode rate of the last run that ended.", "lane")
        self._speedup = gauge("decode_speedup", "Decode speed-up of the last run that ended, by mode.", "mode")
        self._cost = gauge("step_cost_ratio", "Cost of a step, speculative / baseline, of the last run in turn.")
        self._speedups = histogram("run_decode_speedup", "Decode speed-ups of all runs.", SPEEDUP_BUCKETS, "mode")
        self.registry.register(_Scrape(fleet, sampler))

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def step(self, lane: LaneName, step: Step, previous: Step | None) -> None:
        """Count one step of a run; ``previous`` is None for its first."""
        labels = (self._source, lane)
        self._steps.labels(*labels).inc()
        self._tokens.labels(*labels).inc(len(step.ids))
        if previous is None:
            self._ttft.labels(*labels).observe(step.t_ms / 1000)
        else:
            seconds = (step.t_ms - previous.t_ms) / 1000
            self._step_time.labels(*labels).observe(seconds)
            self._decode_seconds.labels(*labels).inc(max(0.0, seconds))
            self._decode_steps.labels(*labels).inc()
            self._decode_tokens.labels(*labels).inc(len(step.ids))
        if step.drafted:
            self._drafts.labels(*labels).inc()
            self._drafted.labels(*labels).inc(step.drafted)
            self._accepted.labels(*labels).inc(step.accepted)
            for position in range(step.accepted):
                self._accepted_at.labels(*labels, str(position)).inc()

    def lane_ended(self, name: LaneName, lane: LaneRun) -> None:
        if lane.error is not None:
            self._failures.labels(self._source, name).inc()
            return
        rate = lane.metrics().decode_tok_s
        if rate is not None and lane.completed:
            self._tok_s.labels(self._source, name).set(rate)

    def run_ended(self, run: Run) -> None:
        mode = run.request.mode
        self._runs.labels(self._source, mode, run.status).inc()
        comparison = run.comparison or {}
        speedup, cost = comparison.get("decode_speedup"), comparison.get("step_cost_ratio")
        if speedup is not None:
            self._speedup.labels(self._source, mode).set(speedup)
            self._speedups.labels(self._source, mode).observe(speedup)
        if cost is not None:
            self._cost.labels(self._source).set(cost)


class _Scrape(Collector):
    """States and memory, read at scrape time from what is known already (a scrape starts no reading)."""

    def __init__(self, fleet: Fleet, sampler: MemorySampler) -> None:
        self._fleet, self._sampler = fleet, sampler

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        source = self._fleet.source
        state = GaugeMetricFamily(
            "specduel_lane_state", "1 for the state a lane is in.", labels=["source", "lane", "state"]
        )
        for name, lane in self._fleet.lanes.items():
            for value in STATES:
                state.add_metric([source, name, value], float(lane.state == value))
        yield state
        sample = self._sampler.latest
        if sample is None:
            return
        device = GaugeMetricFamily(
            "specduel_device_memory_bytes", "The device's memory.", labels=["source", "kind", "device", "part"]
        )
        for part, bytes_ in (
            ("total", sample.device.total_bytes),
            ("used", sample.device.used_bytes),
            ("free", sample.device.free_bytes),
        ):
            if bytes_ is not None:
                device.add_metric([source, sample.kind, sample.device.name, part], bytes_)
        yield device
        parts = GaugeMetricFamily(
            "specduel_lane_memory_bytes", "A lane's memory, split.", labels=["source", "kind", "lane", "part"]
        )
        for lane_name, memory in sample.lanes.items():
            for part, bytes_ in (
                ("process", memory.process_bytes),
                ("target_weights", memory.target_weights_bytes),
                ("draft_weights", memory.draft_weights_bytes),
                ("kv_allocated", memory.kv_allocated_bytes),
                ("kv_used", memory.kv_used_bytes),
                ("rest", memory.rest_bytes),
            ):
                if bytes_ is not None:
                    parts.add_metric([source, memory.kind, lane_name, part], bytes_)
        yield parts
