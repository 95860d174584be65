// Numbers as the page writes them. null and undefined are "—", never 0.

export const NONE = "—";

const missing = (v) => v === null || v === undefined || Number.isNaN(v);

/** Tokens a second: three significant digits or so, so that the figure keeps its width. */
export function rate(v) {
  if (missing(v)) return NONE;
  if (v < 10) return v.toFixed(2);
  if (v < 100) return v.toFixed(1);
  return v.toLocaleString("en", { maximumFractionDigits: 0 });
}

export function ms(v) {
  if (missing(v)) return NONE;
  if (v < 10) return `${v.toFixed(1)} ms`;
  if (v < 1000) return `${Math.round(v)} ms`;
  return seconds(v, 2);
}

/** Milliseconds, written in seconds. */
export function seconds(v, digits) {
  if (missing(v)) return NONE;
  return `${(v / 1000).toFixed(digits)} s`;
}

/** A ratio is never clamped and never rounded across 1: 0.998 is not "1.00". */
export function ratio(v) {
  if (missing(v)) return NONE;
  let digits = 2;
  while (v !== 1 && Number(v.toFixed(digits)) === 1 && digits < 6) digits += 1;
  return v.toFixed(digits);
}

export const times = (v) => (missing(v) ? NONE : `${ratio(v)}×`);

export function decimal(v, digits = 2) {
  return missing(v) ? NONE : v.toFixed(digits);
}

export function percent(v) {
  if (missing(v)) return NONE;
  const p = v * 100;
  return `${p !== 0 && p < 10 ? p.toFixed(1) : Math.round(p)} %`;
}

export function count(v) {
  return missing(v) ? NONE : v.toLocaleString("en");
}

export function bytes(v) {
  if (missing(v)) return NONE;
  const sign = v < 0 ? "−" : "";
  const n = Math.abs(v);
  for (const [unit, size, digits] of [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 0], ["KiB", 2 ** 10, 0]]) {
    if (n >= size) return `${sign}${(n / size).toFixed(n >= 100 * size ? 0 : digits)} ${unit}`;
  }
  return `${sign}${n} B`;
}

export const signedBytes = (v) => (missing(v) ? NONE : v > 0 ? `+${bytes(v)}` : bytes(v));

/** "faster", "slower" or "no difference", of a speed-up as it is shown. */
export function direction(v) {
  if (missing(v)) return "";
  if (v === 1) return "no difference";
  return v > 1 ? "faster" : "slower";
}
