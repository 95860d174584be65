// The run form: what was typed survives reloads (sessionStorage) and errors; the server is the judge of
// values, and its messages stand beside the field they name.

const KEY = "specduel.form";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const FIELDS = ["prompt", ...NUMBERS, "json_schema"];

export class Controls {
  constructor(form) {
    this.form = form;
    this.#restore();
    form.addEventListener("input", (event) => {
      this.#clearError(event.target);
      this.#changed();
    });
    form.addEventListener("change", () => this.#changed());
    form.addEventListener("click", (event) => {
      if (event.target.closest("#schema-toggle")) this.#toggleSchema();
    });
    document.addEventListener("click", (event) => {
      if (!event.target.closest(".structured")) this.#toggleSchema(false);
    });
    // A picked prompt arrives as a fragment that replaces its fields.
    document.addEventListener("htmx:after:swap", () => {
      const part = this.#part;
      if (part === this.known) return;
      this.known = part;
      this.original = this.#field("prompt").value;
      this.clearErrors();
      this.#changed();
      this.#field("prompt").focus();
      this.#field("prompt").setSelectionRange(0, 0);
    });
    this.#changed();
  }

  get #part() {
    return this.form.querySelector("#prompt-form");
  }

  #field(name) {
    return this.form.querySelector(`[name="${name}"]`);
  }

  get mode() {
    return this.form.querySelector('[name="mode"]:checked').value;
  }

  #restore() {
    this.known = this.#part;
    this.original = this.#field("prompt").value;
    let saved = null;
    try {
      saved = JSON.parse(sessionStorage.getItem(KEY));
    } catch {
      saved = null;
    }
    if (!saved) return;
    for (const name of FIELDS) if (typeof saved[name] === "string") this.#field(name).value = saved[name];
    this.#field("structured").checked = Boolean(saved.structured);
    const mode = this.form.querySelector(`[name="mode"][value="${saved.mode === "in_turn" ? "in_turn" : "together"}"]`);
    mode.checked = true;
    this.#part.dataset.promptId = saved.promptId ?? "";
    this.#part.querySelector("[data-prompt-title]").textContent = saved.title ?? "";
    this.#part.querySelector("[data-prompt-expect]").textContent = saved.expect ?? "";
    this.original = saved.original ?? "";
  }

  #changed() {
    const part = this.#part;
    const expects = part.querySelector("[data-prompt-expect]");
    expects.title = expects.textContent;
    const edited = part.dataset.promptId !== "" && this.#field("prompt").value !== this.original;
    part.querySelector("[data-prompt-edited]").hidden = !edited;
    const saved = Object.fromEntries(FIELDS.map((name) => [name, this.#field(name).value]));
    saved.structured = this.#field("structured").checked;
    saved.mode = this.mode;
    saved.promptId = part.dataset.promptId;
    saved.title = part.querySelector("[data-prompt-title]").textContent;
    saved.expect = expects.textContent;
    saved.original = this.original;
    try {
      sessionStorage.setItem(KEY, JSON.stringify(saved));
    } catch {
      // Storage is full or forbidden: the form still works, it just won't survive a reload.
    }
  }

  #toggleSchema(open = this.form.querySelector("#schema-panel").hidden) {
    this.form.querySelector("#schema-panel").hidden = !open;
    this.form.querySelector("#schema-toggle").setAttribute("aria-expanded", String(open));
    if (open) this.#field("json_schema").focus();
  }

  closeSchema() {
    this.#toggleSchema(false);
  }

  /** The request as the contract wants it, or null after showing what can't be sent. */
  request() {
    this.clearErrors();
    const request = { prompt: this.#field("prompt").value, mode: this.mode };
    for (const name of NUMBERS) {
      const text = this.#field(name).value.trim();
      const value = Number(text);
      request[name] = text === "" || Number.isNaN(value) ? text : value; // the server names what is wrong
    }
    if (this.#field("structured").checked) {
      const text = this.#field("json_schema").value.trim();
      if (text === "") {
        this.showError("json_schema", "The schema is empty. Enter a JSON Schema object, or switch this off.");
        return null;
      }
      try {
        request.json_schema = JSON.parse(text);
      } catch (error) {
        this.showError("json_schema", `The schema isn't valid JSON: ${error.message}.`);
        return null;
      }
    }
    const id = this.#part.dataset.promptId;
    if (id !== "" && request.prompt === this.original) request.prompt_id = id;
    return request;
  }

  /** A field that is being corrected loses its message. */
  #clearError(field) {
    field.removeAttribute("aria-invalid");
    for (const name of [field.name, ""]) {
      const box = this.form.querySelector(`[data-error-for="${CSS.escape(name)}"]`);
      if (box) box.hidden = true;
    }
  }

  clearErrors() {
    for (const box of this.form.querySelectorAll(".field-error")) box.hidden = true;
    for (const field of this.form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  }

  /** Shows a message beside the field it names, or under Run. */
  showError(param, message) {
    const name = param === "messages" ? "prompt" : param?.split(".")[0];
    const box = this.form.querySelector(`[data-error-for="${CSS.escape(name ?? "")}"]`)
      ?? this.form.querySelector('[data-error-for=""]');
    box.textContent = message;
    box.hidden = false;
    const field = name ? this.#field(name) : null;
    if (!field) return;
    if (name === "json_schema") this.#toggleSchema(true);
    if (field.type !== "radio") field.setAttribute("aria-invalid", "true");
    field.focus();
  }

  /** Running: everything stays readable, nothing can be changed. */
  lock(locked) {
    for (const field of this.form.querySelectorAll("input, textarea")) field.disabled = locked;
    this.form.querySelector("#open-library").disabled = locked;
    if (locked) this.closeSchema();
    this.form.classList.toggle("locked", locked);
  }

  get prompt() {
    return this.#field("prompt").value;
  }
}
