// Definitions of figures: shown on hover and on keyboard focus, closed by Escape. The text is the help
// dialog's, which aria-describedby points at; a reason for a "—" is added where one is known.

export class Tooltip {
  constructor(box, reasonOf) {
    this.box = box;
    this.reasonOf = reasonOf;
    const on = (event) => {
      const term = event.target.closest?.(".term");
      if (term) this.#show(term);
    };
    const off = (event) => {
      if (event.target.closest?.(".term")) this.hide();
    };
    document.addEventListener("pointerover", on);
    document.addEventListener("pointerout", off);
    document.addEventListener("focusin", (event) => {
      if (event.target.matches?.(".term:focus-visible")) on(event);
    });
    document.addEventListener("focusout", off);
    document.addEventListener("click", on);
  }

  get visible() {
    return !this.box.hidden;
  }

  hide() {
    this.box.hidden = true;
  }

  #show(term) {
    const definition = document.getElementById(`def-${term.dataset.term}`);
    if (!definition) return;
    const meaning = document.createElement("p");
    meaning.textContent = definition.firstChild.textContent.trim();
    const formula = document.createElement("p");
    formula.className = "formula";
    formula.textContent = definition.querySelector(".formula").textContent;
    this.box.replaceChildren(meaning, formula);
    const reason = this.reasonOf(term.dataset.term, term.dataset.lane);
    if (reason) {
      const why = document.createElement("p");
      why.className = "tooltip-reason";
      why.textContent = reason;
      this.box.append(why);
    }
    this.box.hidden = false;
    const at = term.getBoundingClientRect();
    const { width, height } = this.box.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left + at.width / 2 - width / 2), innerWidth - width - 8);
    const below = at.bottom + 8 + height < innerHeight;
    this.box.style.left = `${left}px`;
    this.box.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - height - 8)}px`;
  }
}
