// Zoom and hover for the pages of report/html. The numbers of a timeline stand beside its picture as JSON, each as the
// difference from the moment before; here they are added up and any stretch of them is drawn again. No library, no request.
"use strict";
(() => {
  const W = 960, H = 300, LEFT = 92, RIGHT = 10, TOP = 12, BOTTOM = 34, INNER = W - LEFT - RIGHT;
  const tip = document.getElementById("tip");
  const UNITS = [["PiB", 2 ** 50], ["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

  const bytes = (n) => {
    for (const [unit, scale] of UNITS)
      if (n >= scale) return (n / scale).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) + " " + unit;
    return n + " B";
  };
  const sums = (changes) => { let now = 0; return changes.map((change) => (now += change)); };

  const showTip = (text, event) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(4, event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16) + "px";
  };
  const hideTip = () => { tip.hidden = true; };

  document.addEventListener("pointermove", (event) => {
    const told = event.target.closest ? event.target.closest("[data-tip]") : null;
    if (told) showTip(told.dataset.tip, event);
    else if (!event.target.closest || !event.target.closest("svg.plot")) hideTip();
  });

  class Timeline {
    constructor(section) {
      const data = JSON.parse(section.querySelector("script").textContent);
      this.data = data;
      this.svg = section.querySelector("svg.plot");
      this.drawing = section.querySelector(".drawing");
      this.clock = sums(data.times).map((time) => time / data.scale);
      this.layers = data.layers.map((layer) => ({ ...layer, values: sums(layer.values), on: true }));
      this.outline = data.outline && { ...data.outline, values: sums(data.outline.values) };
      this.count = this.clock.length;
      this.byTime = true;
      this.hover = null;
      this.brush = null;
      this.useAxis();
      this.addTools(section.querySelector(".tools"));
      this.listen(section);
      this.draw();
    }

    useAxis() {
      this.x = this.byTime ? this.clock : this.clock.map((_, number) => number);
      const last = this.x[this.count - 1];
      this.end = last + (this.count > 1 ? (last - this.x[0]) / this.count : 1);
      this.from = this.x[0];
      this.to = this.end;
    }

    addTools(tools) {
      const add = (text, act) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = text;
        button.onclick = () => { act(button); this.draw(); };
        tools.append(button);
      };
      add("whole", () => { this.from = this.x[0]; this.to = this.end; });
      add("peak", () => {
        const width = (this.end - this.x[0]) / 20, at = this.x[this.peak(0, this.count)];
        this.move(at - width / 2, at + width / 2);
      });
      if (this.data.unit === "s") add("by event", (button) => {
        this.byTime = !this.byTime;
        button.textContent = this.byTime ? "by event" : "by time";
        this.useAxis();
      });
      const told = document.createElement("span");
      told.className = "quiet";
      told.textContent = "drag or wheel to zoom, double-click for the whole, arrows to move";
      tools.append(told);
    }

    total(i) { let sum = 0; for (const layer of this.layers) if (layer.on) sum += layer.values[i]; return sum; }

    peak(first, last) {
      let best = first;
      for (let i = first, most = -1; i < last; i++) { const sum = this.total(i); if (sum > most) { most = sum; best = i; } }
      return best;
    }

    // The last moment at or before x.
    find(x) {
      let low = 0, high = this.count - 1;
      while (low < high) { const middle = (low + high + 1) >> 1; if (this.x[middle] <= x) low = middle; else high = middle - 1; }
      return low;
    }

    move(from, to) {
      const least = Math.max((this.end - this.x[0]) / 1e6, 1e-9);
      if (to - from < least) { const middle = (from + to) / 2; from = middle - least / 2; to = middle + least / 2; }
      const width = Math.min(to - from, this.end - this.x[0]);
      this.from = Math.max(this.x[0], Math.min(from, this.end - width));
      this.to = this.from + width;
    }

    // Moments that are drawn: all that are visible, or the highest in each column of the picture.
    visible() {
      const first = this.find(this.from);
      let last = this.find(this.to) + 1;
      if (last - first <= INNER) return Array.from({ length: last - first }, (_, i) => first + i);
      const chosen = [];
      for (let column = 0; column < INNER; column++) {
        const begin = first + Math.floor(((last - first) * column) / INNER), end = first + Math.floor(((last - first) * (column + 1)) / INNER);
        chosen.push(this.peak(begin, end));
      }
      return chosen;
    }

    draw() {
      const shown = this.visible(), { from, to } = this;
      const px = (x) => LEFT + (INNER * (Math.min(Math.max(x, from), to) - from)) / (to - from);
      let top = 1;
      for (const i of shown) top = Math.max(top, this.total(i), this.outline ? this.outline.values[i] : 0);
      if (this.data.limit && this.data.limit <= 1.5 * top) top = Math.max(top, this.data.limit);
      const py = (size) => (H - BOTTOM - ((H - TOP - BOTTOM) * size) / (top * 1.04)).toFixed(1);
      const xs = shown.map((i) => px(this.x[i]).toFixed(1));
      xs.push(px(to).toFixed(1));
      let html = this.axes(top, py), below = shown.map(() => 0);
      this.layers.forEach((layer, number) => {
        if (!layer.on) return;
        const above = below.map((low, k) => low + layer.values[shown[k]]);
        if (above.some((high, k) => high !== below[k])) {
          let there = "M", back = "";
          for (let k = 0; k < shown.length; k++) {
            there += (k ? "L" : "") + xs[k] + " " + py(above[k]) + "H" + xs[k + 1];
            back = "L" + xs[k + 1] + " " + py(below[k]) + "H" + xs[k] + back;
          }
          html += `<path d="${there}${back}Z" fill="url(#outsize-p${number % 10})"/>`;
        }
        below = above;
      });
      if (this.outline)
        html += `<path class="outline" d="M${shown.map((i, k) => (k ? "L" : "") + xs[k] + " " + py(this.outline.values[i]) + "H" + xs[k + 1]).join("")}"/>`;
      if (this.data.limit && this.data.limit <= top) html += `<path class="limit" d="M${LEFT} ${py(this.data.limit)}H${W - RIGHT}"/>`;
      html += this.marks(px);
      if (this.hover !== null) html += `<path class="cursor" d="M${px(this.x[this.hover]).toFixed(1)} ${TOP}V${H - BOTTOM}"/>`;
      if (this.brush) {
        const [a, b] = this.brush.map(px).sort((p, q) => p - q);
        html += `<rect class="brush" x="${a}" y="${TOP}" width="${b - a}" height="${H - TOP - BOTTOM}"/>`;
      }
      this.drawing.innerHTML = html;
      this.svg.dataset.from = from;
      this.svg.dataset.to = to;
    }

    axes(top, py) {
      let html = "";
      for (let part = 0; part <= 4; part++) {
        const size = Math.round((top * part) / 4);
        html += `<path class="tick" d="M${LEFT} ${py(size)}H${W - RIGHT}"/><text x="${LEFT - 6}" y="${+py(size) + 4}" text-anchor="end">${bytes(size)}</text>`;
        const anchor = part === 0 ? "start" : part === 4 ? "end" : "middle";
        html += `<text x="${LEFT + (INNER * part) / 4}" y="${H - 18}" text-anchor="${anchor}">${this.when(this.from + ((this.to - this.from) * part) / 4)}</text>`;
      }
      return html;
    }

    marks(px) {
      let html = "", free = -1e9;
      const escaped = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
      for (const [time, name] of this.byTime ? this.data.marks : []) {
        if (time < this.from || time > this.to) continue;
        const place = px(time);
        html += `<path class="mark" d="M${place} ${TOP}V${H - BOTTOM}"/>`;
        if (place > free && place + 6 * name.length < W) { html += `<text x="${place + 3}" y="${H - 4}">${escaped(name)}</text>`; free = place + 12 + 6 * name.length; }
      }
      return html;
    }

    when(x) {
      if (this.data.unit !== "s" || !this.byTime) return "event " + Math.round(x).toLocaleString("en");
      const digits = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(Math.max(this.to - this.from, 1e-9)))));
      return x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + " s";
    }

    text(i) {
      const rows = [this.when(this.x[i]) + (this.data.labels.length ? "  " + this.data.labels[this.data.at[i]] : "")];
      if (this.data.lines.length && this.data.lines[this.data.lineAt[i]]) rows.push("at " + this.data.lines[this.data.lineAt[i]]);
      rows.push(bytes(this.total(i)).padStart(12) + "  together");
      for (const layer of [...this.layers].reverse()) if (layer.on && layer.values[i]) rows.push(bytes(layer.values[i]).padStart(12) + "  " + layer.name);
      if (this.outline) rows.push(bytes(this.outline.values[i]).padStart(12) + "  " + this.outline.name);
      if (this.data.limit) rows.push(bytes(this.data.limit).padStart(12) + "  " + this.data.limitName);
      return rows.join("\n");
    }

    at(event) {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * W;
      return this.from + ((this.to - this.from) * (Math.min(Math.max(x, LEFT), W - RIGHT) - LEFT)) / INNER;
    }

    listen(section) {
      let waiting = false;
      const later = () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; this.draw(); }); } };
      const svg = this.svg;
      svg.addEventListener("wheel", (event) => {
        event.preventDefault();
        const x = this.at(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
        this.move(x - (x - this.from) * factor, x + (this.to - x) * factor);
        later();
      }, { passive: false });
      svg.addEventListener("pointerdown", (event) => { const x = this.at(event); this.brush = [x, x]; svg.setPointerCapture(event.pointerId); });
      svg.addEventListener("pointermove", (event) => {
        const x = this.at(event);
        if (this.brush) this.brush[1] = x;
        const near = this.visible(), i = this.find(x);
        this.hover = near.length === this.count || near.length < INNER ? i : near.reduce((best, k) => (Math.abs(this.x[k] - x) < Math.abs(this.x[best] - x) ? k : best), near[0]);
        showTip(this.text(this.hover), event);
        later();
      });
      svg.addEventListener("pointerup", () => {
        if (!this.brush) return;
        const [a, b] = this.brush.sort((p, q) => p - q);
        this.brush = null;
        if ((b - a) / (this.to - this.from) > 0.005) this.move(a, b);
        later();
      });
      svg.addEventListener("pointerleave", () => { if (!this.brush) { this.hover = null; hideTip(); later(); } });
      svg.addEventListener("dblclick", () => { this.from = this.x[0]; this.to = this.end; later(); });
      svg.addEventListener("keydown", (event) => {
        const width = this.to - this.from;
        const moves = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "-": [-0.3, 0.3] };
        if (event.key === "0") { this.from = this.x[0]; this.to = this.end; }
        else if (moves[event.key]) this.move(this.from + width * moves[event.key][0], this.to + width * moves[event.key][1]);
        else return;
        event.preventDefault();
        later();
      });
      for (const button of section.querySelectorAll("[data-layer]")) button.onclick = () => {
        const layer = this.layers[button.dataset.layer];
        layer.on = !layer.on;
        button.setAttribute("aria-pressed", layer.on);
        this.draw();
      };
    }
  }

  for (const section of document.querySelectorAll("section.timeline")) new Timeline(section);
  document.body.dataset.ready = "yes";
})();
