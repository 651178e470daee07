// How predictions change along each column: everybody, groups, and one user.

import { bottomAxis, byId, drawing, element, explain, figure, leftAxis, linear, number, shape, ticks } from "./basics.js";
import { chosen, clusters, doc, hue, labelOf, naming, noun, nouns, slotOf, state, users, views } from "./model.js";

const curves = doc.curves;
const only = { user: -1 }; // the position, among the users drawn, of the one that is picked
const LINES = 60; // users drawn as thin lines, at most

/** Positions of the users whose lines are drawn: all, or evenly some of them. */
function drawn() {
  const all = curves.shown.length,
    few = Math.min(all, LINES);
  return Array.from({ length: few }, (_, k) => Math.floor(((k + 0.5) * all) / few));
}

/** The ends of the axis of predictions, of all columns: of all but the most extreme users. */
function heights() {
  const all = [];
  for (const { everyone, groups, users: each } of curves.columns) {
    all.push(...everyone, ...groups.flat());
    for (const k of drawn()) all.push(...each[k]);
  }
  all.sort((a, b) => a - b);
  const at = (share) => all[Math.round(share * (all.length - 1))];
  const pad = 0.04 * (at(0.99) - at(0.01)) || 1;
  return [at(0.01) - pad, at(0.99) + pad];
}

function panel(chart, curve, box, range, labelled) {
  const { x, everyone, groups, users: each, name, bends } = curve,
    [left, top, right, bottom] = box;
  const across = linear(x[0], x[x.length - 1], left, right),
    up = linear(...range, bottom, top);
  const path = (values) =>
    values.map((y, k) => `${k ? "L" : "M"}${across(x[k]).toFixed(1)},${up(y).toFixed(1)}`).join("");
  const clip = `clip-${left}-${top}`.replaceAll(".", "-");
  chart.append(
    shape("clipPath", { id: clip }, shape("rect", { x: left, y: top, width: right - left, height: bottom - top })),
    leftAxis(up, ticks(...range, 4), left, right, ""),
    bottomAxis(across, ticks(x[0], x[x.length - 1], (right - left) / 60), bottom, left, right, ""),
    shape("text", { x: left, y: top - 12, class: "strong", text: name }),
    shape("text", {
      x: right,
      y: top - 12,
      "text-anchor": "end",
      class: bends ? "bends" : "soft",
      text: bends ? (curve.differs ? `bends, by ${noun}` : "bends") : "straight",
    }),
  );
  const inside = shape("g", { "clip-path": `url(#${clip})` });
  const several = groups.length > 1 && groups.length < curves.shown.length;
  for (const k of drawn()) {
    const user = curves.shown[k];
    const style = several && user >= 0 ? hue(slotOf(labelOf(user, chosen), chosen)) : "alone";
    const line = shape("path", { d: path(each[k]), class: `one ${style}`, "data-user": user });
    const hit = shape("path", { d: path(each[k]), class: "hit-line" });
    hit.addEventListener("pointerenter", () => {
      for (const other of chart.querySelectorAll(".one"))
        other.classList.toggle("picked", other.dataset.user === String(user));
    });
    hit.addEventListener("pointerleave", () => {
      for (const other of chart.querySelectorAll(".one.picked")) other.classList.remove("picked");
    });
    inside.append(line, explain(hit, () => [`${noun} ${users[user] ?? ""}`, name]));
  }
  if (several)
    groups.forEach((values, k) =>
      inside.append(shape("path", { d: path(values), class: `many ${hue(slotOf(k, chosen))}` })),
    );
  inside.append(shape("path", { d: path(everyone), class: several ? "every thin" : "every" }));
  if (only.user >= 0) inside.append(shape("path", { d: path(each[only.user]), class: "chosen-one" }));
  chart.append(inside);
  if (labelled) chart.append(shape("text", { x: 0, y: 12, class: "soft", text: curves.target }));
}

function drawCurves(width) {
  const count = curves.columns.length,
    across = Math.min(count, width < 560 ? 1 : width < 860 ? 2 : 3);
  const gap = 26,
    left = 46,
    wide = Math.min(across === 1 ? 900 : 620, (width - gap * (across - 1)) / across),
    tall = across === 1 ? 330 : 250;
  const head = 22;
  const chart = drawing(width, head + tall * Math.ceil(count / across), `${curves.target} along each column`, true);
  const range = heights();
  curves.columns.forEach((curve, k) => {
    const x = (k % across) * (wide + gap),
      y = head + Math.floor(k / across) * tall;
    panel(chart, curve, [x + left, y + 24, x + wide - 6, y + tall - 34], range, k === 0);
  });
  return chart;
}

export function setUpCurves() {
  const section = byId("curves");
  if (!curves || !curves.columns.length) {
    section.hidden = true;
    return;
  }
  const bent = curves.columns.filter(({ bends }) => bends);
  if (!bent.length) section.querySelector("h2").textContent = "What each column does";
  byId("curves-lead").textContent = (doc.headline || {}).curves || "";
  const body = section.querySelector(".body");
  const choice = element(
    "select",
    { id: "one-user", onchange: () => ((only.user = Number(choice.value)), holder.redraw()) },
    element("option", { value: -1, text: "none" }),
    ...curves.shown
      .map((user, k) => [users[user], k])
      .filter(([name]) => name !== undefined)
      .map(([name, k]) => element("option", { value: k, text: name })),
  );
  body.append(element("div", { class: "tools" }, element("label", {}, `Show one ${noun}: `, choice), legend()));
  const holder = figure(body, {
    name: "curves",
    title: `${curves.target} along each column`,
    draw: drawCurves,
    note:
      `Predictions with all other columns at their mean. Thick: the mean of all ${nouns}; thin: ${nouns} one by one` +
      `${curves.shown.length > LINES ? ` (${LINES} of them)` : ""}. All panels have the same scale.`,
    rows: () => [
      ["column", "value", "all", ...curves.columns[0].groups.map((_, k) => naming(k))],
      ...curves.columns.flatMap(({ name, x, everyone, groups }) =>
        x.map((value, k) => [name, number(value, 6), everyone[k], ...groups.map((each) => each[k])]),
      ),
    ],
  });
  views.push(() => {
    if (state.selected === null || state.selected.size !== 1) return;
    const [user] = state.selected;
    only.user = curves.shown.indexOf(user);
    choice.value = String(only.user);
  });
}

function legend() {
  const groups = [...clusters(chosen).keys()];
  if (groups.length < 2 || groups.length === users.length || groups.length > 12) return null;
  return element(
    "span",
    { class: "legend" },
    ...groups.map((k) => element("span", {}, element("i", { class: `swatch ${hue(slotOf(k, chosen))}` }), naming(k))),
  );
}
