// tok/s over time (uPlot), acceptance by position, memory.

import * as format from "./format.js";
import { LANES, TITLES, rateSeries } from "./run.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

export class RateChart {
  constructor(box) {
    this.box = box;
    this.clear();
    new ResizeObserver(() => this.#build()).observe(box);
  }

  /** Draws both lanes' decode speed; time runs from each lane's own request. */
  update(run) {
    const lanes = LANES.map((name) => run.lanes[name].steps);
    const endMs = Math.max(0, ...lanes.map((steps) => steps.at(-1)?.t_ms ?? 0));
    if (endMs === 0) return this.clear();
    this.box.classList.remove("empty");
    const windowMs = Math.min(2000, Math.max(150, endMs / 10));
    const points = 120;
    const grid = Array.from({ length: points + 1 }, (_, i) => (endMs * i) / points);
    this.data = [grid.map((t) => t / 1000), ...lanes.map((steps) => rateSeries(steps, grid, windowMs))];
    this.plot?.setData(this.data);
  }

  clear() {
    this.box.classList.add("empty"); // an axis without a measurement would show made-up figures
    this.data = [[0, 1], [null, null], [null, null]];
    this.plot?.setData(this.data);
  }

  #build() {
    const width = Math.floor(this.box.clientWidth);
    const height = Math.floor(this.box.clientHeight);
    if (width < 40 || height < 40) return;
    const unit = rem();
    if (this.plot && this.unit === unit) {
      this.plot.setSize({ width, height });
      return;
    }
    this.plot?.destroy();
    this.unit = unit;
    const font = `${Math.max(12, 0.9 * unit)}px Inter, sans-serif`;
    const axis = {
      stroke: css("--dim"), font, grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, gap: 0.3 * unit,
    };
    const line = (name) => ({
      label: TITLES[name], stroke: css(`--${name}`), width: Math.max(2, 0.15 * unit), points: { show: false },
      spanGaps: false,
    });
    this.plot = new window.uPlot({
      width,
      height,
      padding: [0.4 * unit, 1.4 * unit, 0, 0],
      cursor: { show: false },
      legend: { show: false },
      scales: { x: { time: false }, y: { range: (u, min, max) => [0, max > 0 ? max * 1.1 : 1] } },
      axes: [
        { ...axis, size: 1.7 * unit, space: 4 * unit, values: (u, at) => at.map((v) => `${v} s`) },
        { ...axis, size: 3.2 * unit, space: 2 * unit },
      ],
      series: [{}, line("baseline"), line("speculative")],
    }, this.data, this.box);
  }
}

export class AcceptanceBars {
  constructor(list, empty) {
    this.list = list;
    this.empty = empty;
    this.shown = "";
  }

  update(values, reason) {
    const known = Array.isArray(values) && values.some((v) => v !== null);
    this.empty.hidden = known;
    this.list.hidden = !known;
    if (!known) {
      this.empty.textContent = reason;
      return;
    }
    const shown = values.map((v) => format.percent(v)).join();
    if (shown === this.shown) return;
    this.shown = shown;
    while (this.list.children.length > values.length) this.list.lastChild.remove();
    while (this.list.children.length < values.length) {
      const item = document.createElement("li");
      for (const part of ["bar-value", "bar", "bar-name"]) {
        const span = document.createElement("span");
        span.className = part;
        item.append(span);
      }
      this.list.append(item);
    }
    values.forEach((value, i) => {
      const [text, bar, name] = this.list.children[i].children;
      text.textContent = format.percent(value);
      bar.style.setProperty("--v", String(value ?? 0));
      name.textContent = `${i + 1}`;
    });
  }
}

const PARTS = [
  ["target_weights_bytes", "target weights", "target"],
  ["draft_weights_bytes", "draft weights", "draft"],
  ["kv_used", "KV used", "kv-used"],
  ["kv_free", "KV reserved", "kv-free"],
  ["rest_bytes", "rest", "rest"],
];

/** A lane's memory as parts that add up; parts that can't be read are left out and named in `unknown`. */
function partsOf(memory) {
  const kvUsed = memory.kv_used_bytes;
  const kvAll = memory.kv_allocated_bytes;
  const values = {
    target_weights_bytes: memory.target_weights_bytes,
    draft_weights_bytes: memory.draft_weights_bytes,
    kv_used: kvUsed,
    kv_free: kvAll === null || kvAll === undefined ? null : kvAll - (kvUsed ?? 0),
    rest_bytes: memory.rest_bytes,
  };
  return PARTS.map(([key, label, tone]) => ({ key, label, tone, bytes: values[key] }));
}

/** One line that says why something can't be read, each reason once. */
function reasonLine(memory) {
  const reasons = new Set();
  for (const lane of Object.values(memory.lanes ?? {})) {
    for (const [field, why] of Object.entries(lane.reasons ?? {})) {
      reasons.add(`${field.replace(/_bytes$/, "").replaceAll("_", " ")} —: ${why}`);
    }
  }
  if (memory.device?.reason) reasons.add(`device —: ${memory.device.reason}`);
  if (reasons.size === 0) return [];
  const line = document.createElement("p");
  line.className = "memory-reason";
  line.textContent = [...reasons].join("; ");
  line.title = line.textContent;
  return [line];
}

export class MemoryBars {
  constructor(box, kindLabel) {
    this.box = box;
    this.kindLabel = kindLabel;
    this.shown = "";
  }

  update(memory) {
    if (!memory) return;
    const shown = JSON.stringify({ ...memory, t_ms: 0 });
    if (shown === this.shown) return;
    this.shown = shown;
    this.kindLabel.textContent = memory.kind === "vram" ? "VRAM" : "RAM";
    const rows = [];
    const lanes = LANES.filter((name) => memory.lanes?.[name]).map((name) => [name, memory.lanes[name]]);
    const scale = Math.max(1, ...lanes.map(([, m]) => {
      const sum = partsOf(m).reduce((n, p) => n + (p.bytes ?? 0), 0);
      return Math.max(m.process_bytes ?? 0, sum);
    }));
    for (const [name, m] of lanes) {
      const parts = partsOf(m);
      const reasons = Object.entries(m.reasons ?? {}).map(([field, why]) => `${field.replaceAll("_", " ")}: ${why}`);
      rows.push(this.#row(TITLES[name], name, format.bytes(m.process_bytes), parts, scale, reasons));
    }
    const d = memory.device;
    if (d) {
      const parts = [];
      if (d.total_bytes) {
        parts.push({ label: "in use", tone: "used", bytes: d.used_bytes });
        parts.push({ label: "free", tone: "free", bytes: d.free_bytes });
      }
      const text = d.free_bytes === null || d.free_bytes === undefined ? format.NONE : `${format.bytes(d.free_bytes)} free`;
      const reasons = d.reason ? [d.reason] : [];
      rows.push(this.#row("Device", "device", text, parts, d.total_bytes ?? 1, reasons));
    }
    const key = document.createElement("p");
    key.className = "memory-key";
    for (const [, label, tone] of PARTS) {
      const item = document.createElement("span");
      item.className = `key key-${tone}`;
      item.textContent = label;
      key.append(item);
    }
    this.box.replaceChildren(...rows, key, ...reasonLine(memory));
  }

  #row(title, tone, total, parts, scale, reasons) {
    const row = document.createElement("div");
    row.className = `memory-row memory-row-${tone}`;
    const name = document.createElement("span");
    name.className = "memory-name";
    name.textContent = title;
    const bar = document.createElement("span");
    bar.className = "memory-bar";
    const said = [];
    for (const part of parts) {
      if (part.bytes === null || part.bytes === undefined) continue;
      said.push(`${part.label} ${format.bytes(part.bytes)}`);
      if (part.bytes <= 0) continue;
      const block = document.createElement("span");
      block.className = `part part-${part.tone}`;
      block.style.setProperty("--v", String(part.bytes / scale));
      bar.append(block);
    }
    said.push(...reasons);
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${title}: ${said.join(", ")}`);
    row.title = said.join("\n");
    const value = document.createElement("span");
    value.className = "memory-total";
    value.textContent = total;
    row.append(name, bar, value);
    return row;
  }
}
