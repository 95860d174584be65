// The HTTP calls of the page. Errors are ApiError with the server's type, message and field.

export class ApiError extends Error {
  constructor(status, type, message, param) {
    super(message);
    this.status = status;
    this.type = type;
    this.param = param;
  }
}

async function call(method, url, body) {
  let response;
  try {
    response = await fetch(url, {
      method,
      headers: body === undefined ? {} : { "content-type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
    });
  } catch {
    throw new ApiError(0, "unreachable", "The server can't be reached. Your input is kept; try again.");
  }
  let data = null;
  try {
    data = await response.json();
  } catch {
    data = null;
  }
  if (!response.ok) {
    const e = data?.error ?? {};
    throw new ApiError(
      response.status, e.type ?? "error", e.message ?? `The server answered ${response.status}.`, e.param,
    );
  }
  return data;
}

export const getState = () => call("GET", "/api/state");
export const getRecord = (id) => call("GET", `/api/runs/${encodeURIComponent(id)}`);
export const startRun = (request) => call("POST", "/api/runs", request);
export const stopRun = (id) => call("DELETE", `/api/runs/${encodeURIComponent(id)}`);
export const restartLane = (lane) => call("POST", `/api/lanes/${encodeURIComponent(lane)}/restart`);
export const switchMethod = (wanted) => call("POST", "/api/lanes/speculative/method", wanted);

/**
 * Reads the server's five test events (200 ms apart) and says whether something on the way held them back.
 * Resolves to null when the answer isn't to be had.
 */
export async function streamIsBuffered(signal) {
  try {
    const response = await fetch("/api/stream-check", { cache: "no-store", signal });
    if (!response.ok || !response.body) return null;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const arrivals = [];
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const now = performance.now();
      for (const line of value.split("\n")) if (line.startsWith("data:")) arrivals.push(now);
    }
    if (arrivals.length < 3) return null;
    return arrivals.at(-1) - arrivals[0] < 300;
  } catch {
    return null;
  }
}
