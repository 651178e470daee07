// Elements, numbers as text, scales, the tooltip and downloads. Data reaches the page as text nodes only.

const SVG = "http://www.w3.org/2000/svg";
export const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
export const element = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const shape = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Numbers -----------------------------------------------------------------------------------------------------------

export const known = (x) => typeof x === "number" && Number.isFinite(x);
export const integer = (x) => (known(x) ? Math.round(x).toLocaleString("en-US") : "–");
/** The plural of a word, as `plural` in labels.py. */
export const severally = (word) =>
  /[^aeiou]y$/.test(word) ? word.replace(/y$/, "ies") : word + (/(s|x|ch|sh)$/.test(word) ? "es" : "s");
export const plural = (n, one, many) => `${integer(n)} ${n === 1 ? one : many || severally(one)}`;
export const percent = (x) => `${Math.round(100 * x)}%`;

// Long names lose their middle: those with the same beginning still differ.
export function trimmed(name, room) {
  const letters = Array.from(name);
  const head = Math.max(1, Math.floor((room - 1) / 2));
  const tail = Math.max(1, room - 1 - head);
  if (letters.length <= Math.max(3, room)) return name;
  return `${letters.slice(0, head).join("")}…${letters.slice(-tail).join("")}`;
}

/** The digits behind the point that the first digit of an error has; or three digits of a number have. */
export const digitsOf = (error, digits = 1) =>
  known(error) && error > 0 ? Math.min(8, Math.max(0, digits - 1 - Math.floor(Math.log10(error)))) : 0;
/** A number and its standard error, both rounded to the first digit of the error. */
export function withError(x, error) {
  if (!known(x)) return "–";
  if (!known(error)) return number(x, 2);
  const fixed = (value) => value.toFixed(digitsOf(error || x)).replace(/^-(0(\.0*)?)$/, "$1");
  return `${x > 0 ? "+" : ""}${fixed(x)} ± ${fixed(error)}`;
}

/** A question mark that opens one sentence. */
export function help(text) {
  const sentence = element("span", { class: "explained", text, hidden: true });
  const button = element("button", {
    type: "button",
    class: "help",
    text: "?",
    "aria-label": "What does this mean?",
    "aria-expanded": "false",
    onclick: () => {
      sentence.hidden = !sentence.hidden;
      button.setAttribute("aria-expanded", String(!sentence.hidden));
    },
  });
  return [" ", button, sentence];
}

export const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

export function number(x, digits = 4) {
  if (!known(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e-3 || size >= 1e6) {
    const [mantissa, exponent] = x.toExponential(Math.min(2, digits - 1)).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  if (size >= 1e4) return Math.round(x).toLocaleString("en-US");
  return String(Number(x.toPrecision(digits)));
}
// What single precision holds of a number: 0.9 rather than 0.8999999761581421.
export const single = (x) => (known(x) ? Number(x.toPrecision(7)) : null);

export function bytes(n) {
  let unit = 0;
  while (n >= 1000 && unit < 4) {
    n /= 1000;
    unit += 1;
  }
  return `${unit ? Number(n.toPrecision(3)) : n} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

export function unpack(part) {
  if (!part) return null;
  const text = atob(part.data);
  const raw = Uint8Array.from(text, (c) => c.charCodeAt(0));
  const kinds = { u2: Uint16Array, u4: Uint32Array, f4: Float32Array };
  return { values: new kinds[part.kind](raw.buffer), shape: part.shape };
}

// Scales ------------------------------------------------------------------------------------------------------------

export function linear(low, high, start, end) {
  const span = high - low || 1;
  return (x) => start + ((x - low) / span) * (end - start);
}

export function logarithmic(low, high, start, end) {
  const f = linear(Math.log(low), Math.log(high), start, end);
  return (x) => f(Math.log(x));
}

const TICKS = 7; // on an axis, at most

export function ticks(low, high, count) {
  const rough = (high - low || 1) / Math.min(Math.max(1, count), TICKS - 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const values = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1)
    values.push(Number((k * step).toPrecision(12)));
  return values;
}

export function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  const values = [];
  const step = Math.max(1, Math.ceil(decades / Math.min(TICKS, Math.max(1, count))));
  const factors = decades > count * 0.7 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    if (power % step !== 0 && factors.length === 1) continue;
    for (const factor of factors) {
      const x = Number((factor * 10 ** power).toPrecision(6));
      if (x >= low * 0.999 && x <= high * 1.001) values.push(x);
    }
  }
  const every = Math.ceil(values.length / TICKS);
  return values.length ? values.filter((_, k) => k % every === 0) : [low];
}

/** Numbers of an axis with as many digits behind the point as the longest has. */
function alike(values) {
  if (values.some((x) => x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e4))) return number;
  const digits = Math.max(0, ...values.map((x) => (String(Number(x.toPrecision(7))).split(".")[1] || "").length));
  const steps = values.map((x, k) => (k ? x - values[k - 1] : null)).filter(known);
  const even = steps.length > 1 && Math.max(...steps) < 1.01 * Math.min(...steps);
  return even ? (x) => x.toFixed(digits) : number;
}

// Labels that would touch an earlier one are left out.
function spaced(values, scale, text, size = 7) {
  let last = -Infinity;
  return values.filter((x) => {
    const half = (text(x).length * size) / 2 + 5;
    if (scale(x) - half < last) return false;
    last = scale(x) + half;
    return true;
  });
}

export function bottomAxis(scale, values, y, left, right, label, text = alike(values)) {
  const group = shape("g", { class: "axis" }, shape("line", { x1: left, x2: right, y1: y, y2: y, class: "rule" }));
  for (const x of spaced(values, scale, text)) {
    group.append(
      shape("line", { x1: scale(x), x2: scale(x), y1: y, y2: y + 4, class: "rule" }),
      shape("text", { x: scale(x), y: y + 16, "text-anchor": "middle", text: text(x) }),
    );
  }
  if (label) group.append(shape("text", { x: right, y: y + 32, "text-anchor": "end", class: "name", text: label }));
  return group;
}

export function leftAxis(scale, values, x, right, label, text = alike(values)) {
  const group = shape("g", { class: "axis" });
  for (const y of values) {
    group.append(
      shape("line", { x1: x, x2: right, y1: scale(y), y2: scale(y), class: "grid" }),
      shape("text", { x: x - 7, y: scale(y) + 3.5, "text-anchor": "end", text: text(y) }),
    );
  }
  if (label) group.append(shape("text", { x: 0, y: 11, class: "name", text: label }));
  return group;
}

// Tooltip -----------------------------------------------------------------------------------------------------------

const tip = byId("tip");

function showTip(lines, box) {
  tip.replaceChildren(...lines.filter(Boolean).map((line, k) => element(k ? "span" : "b", { text: line })));
  tip.hidden = false;
  const own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 8);
  const above = box.top - own.height - 10;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 10}px`;
}
export const hideTip = () => {
  tip.hidden = true;
};

export function explain(node, lines) {
  const show = () => showTip(lines(), node.getBoundingClientRect());
  node.addEventListener("pointerenter", show);
  node.addEventListener("focus", show);
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("blur", hideTip);
  return node;
}
addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});

// One tab stop for many marks; arrows go from one to the next, Enter and space press.
export function roving(nodes, press, first = 0) {
  nodes.forEach((node, k) => {
    node.setAttribute("tabindex", k === Math.max(first, 0) ? "0" : "-1");
    node.addEventListener("click", () => press(k));
    node.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) {
        const other = nodes[(k + step + nodes.length) % nodes.length];
        node.setAttribute("tabindex", "-1");
        other.setAttribute("tabindex", "0");
        other.focus();
      } else if (event.key === "Enter" || event.key === " ") press(k);
      else return;
      event.preventDefault();
    });
  });
}

// Downloads ---------------------------------------------------------------------------------------------------------

// A text that a spreadsheet would take for a formula gets an apostrophe; numbers stay numbers.
function cell(value) {
  if (value === null || value === undefined || (typeof value === "number" && !Number.isFinite(value))) return "";
  let text = String(value);
  const numeric = typeof value === "number" || (text.trim() !== "" && Number.isFinite(Number(text)));
  if (!numeric && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
const csvText = (rows) => rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
export const saveCsv = (rows, name) =>
  save(new Blob([csvText(rows)], { type: "text/csv;charset=utf-8" }), `${name}.csv`);

const LOOKS = [
  "fill",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-linejoin",
  "stroke-linecap",
  "opacity",
  "fill-opacity",
  "stroke-opacity",
  "font-size",
  "font-family",
  "font-weight",
  "text-anchor",
  "visibility",
  "display",
];

function inlined(original) {
  const copy = original.cloneNode(true);
  const from = [original, ...original.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, k) => {
    const style = getComputedStyle(from[k]);
    for (const name of LOOKS) node.setAttribute(name, style.getPropertyValue(name));
  });
  return copy;
}

function savePng(original, title, name) {
  const [, , width, height] = original.getAttribute("viewBox").split(" ").map(Number);
  const page = getComputedStyle(byId("main").querySelector("section"));
  const pad = 16,
    head = 30;
  const full = [width + 2 * pad, height + 2 * pad + head];
  const copy = inlined(original);
  copy.setAttribute("x", pad);
  copy.setAttribute("y", pad + head);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const sheet = shape(
    "svg",
    { xmlns: SVG, width: full[0], height: full[1] },
    shape("rect", { width: "100%", height: "100%", fill: page.backgroundColor }),
    shape("text", {
      x: pad,
      y: pad + 14,
      fill: page.color,
      "font-size": 15,
      "font-weight": 600,
      "font-family": page.fontFamily,
      text: title,
    }),
    copy,
  );
  const image = new Image();
  image.addEventListener("load", () => {
    const canvas = element("canvas", { width: 2 * full[0], height: 2 * full[1] });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(blob, `${name}.png`), "image/png");
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(sheet))}`;
}

// Figures -----------------------------------------------------------------------------------------------------------

const figures = [];

/** A titled chart with its downloads: draw(width) gives an svg, rows() the table behind it. */
export function figure(parent, { name, title, draw, rows, note }) {
  const button = (text, label, onclick) =>
    element("button", {
      type: "button",
      class: "small",
      text,
      onclick,
      "aria-label": `${label}: ${title}`,
      "data-download": `${name}-${text.toLowerCase()}`,
    });
  const slot = element("div", { class: "plot" });
  const holder = {
    slot,
    drawn: null,
    width: 0,
    redraw() {
      if (this.width < 40) return;
      const key = slot.contains(document.activeElement) ? document.activeElement.getAttribute("data-key") : null;
      this.drawn = draw(this.width);
      slot.replaceChildren(this.drawn);
      const again = key && slot.querySelector(`[data-key="${key}"]`);
      if (again) again.focus({ preventScroll: true });
    },
  };
  const downloads = element(
    "span",
    { class: "downloads" },
    button("CSV", "Download the numbers", () => saveCsv(rows(), name)),
    button("PNG", "Download the picture", () => savePng(holder.drawn, title, name)),
  );
  parent.append(
    element(
      "figure",
      { id: `figure-${name}` },
      element("figcaption", {}, element("span", { class: "caption", text: title }), downloads),
      slot,
      note ? element("p", { class: "note", text: note }) : null,
    ),
  );
  figures.push(holder);
  return holder;
}

/** Widths are measured only when they change: each measure makes the browser lay out the page. */
export function measure(most = Infinity) {
  for (const holder of figures)
    holder.width = holder.slot.closest("details:not([open])")
      ? 0
      : Math.min(most, Math.floor(holder.slot.getBoundingClientRect().width));
}
export function redrawAll() {
  for (const holder of figures) holder.redraw();
}

export function drawing(width, height, label, interactive) {
  return shape("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    "aria-label": label,
    role: interactive ? "group" : "img",
  });
}
