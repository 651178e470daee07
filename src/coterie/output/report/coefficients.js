// The models of the groups side by side, and how personal each coefficient is.

import {
  byId, digitsOf, drawing, element, figure, known, number, percent, plural, shape, single, trimmed, unpack, integer,
} from "./basics.js";
import {
  clusters, dimmed, doc, hue, naming, noun, nouns, outline, points, separate, sharing, slotOf, state, users, views, word,
} from "./model.js";

const table = doc.coefficients
  ? {
      ...doc.coefficients,
      clusters: unpack(doc.coefficients.clusters),
      standardized: unpack(doc.coefficients.standardized),
    }
  : null;
const FEW = 24;
/** What is shown of the table; standard: of standardised columns, not in the units of the table. */
const view = { output: 0, all: false, everyGroup: false, sorted: false, standard: false };

/** The numbers of the groups shown now. */
function shownGroups() {
  const which = table.which[state.at] || [];
  return view.everyGroup ? which : which.slice(0, FEW);
}

function coefficientRow(at, position, standard = view.standard) {
  const names = table.names,
    outputs = table.outputs ? table.outputs.length : 1;
  let row = position;
  for (let k = 0; k < at; k += 1) row += table.which[k].length;
  const start = row * names.length * outputs;
  const { values } = standard ? table.standardized : table.clusters;
  return names.map((_, j) => values[start + j * outputs + view.output]);
}

/** The names of some coefficients, one below the other, and how wide they are. */
function nameColumn(names, width) {
  const longest = names.reduce((most, name) => Math.max(most, name.length), 4);
  const left = Math.min(width * 0.34, 14 + 7.2 * Math.min(longest, 26));
  const room = Math.floor((left - 14) / 6.8);
  const draw = (top, tall) =>
    names.map((name, k) =>
      shape(
        "text",
        { x: left - 10, y: top + tall * k + 15, "text-anchor": "end", class: "feature", text: trimmed(name, room) },
        shape("title", { text: name }),
      ),
    );
  return { left, draw };
}

/** A group of several, or the only member of one. */
const title = (k, members) =>
  members.length === 1 ? users[members[0]] : members.length === users.length ? `all ${nouns}` : naming(k);

function drawCoefficients(width) {
  const which = shownGroups();
  const rows = which.map((_, position) => coefficientRow(state.at, position));
  let order = [...table.names.keys()];
  const size = (j) => rows.reduce((most, row) => (known(row[j]) ? Math.max(most, Math.abs(row[j])) : most), 0);
  const spread = (j) => Math.max(...rows.map((row) => row[j])) - Math.min(...rows.map((row) => row[j]));
  // In their own units, differences are compared with the size of the coefficient.
  const difference = (j) => (!view.standard ? spread(j) / (size(j) || 1) : spread(j));
  // A model without another to compare with: how much each column weighs.
  const lone = which.length === 1 && table.standardized ? coefficientRow(state.at, 0, true) : null;
  const largest = lone ? Math.max(...lone.slice(0, -1).map(Math.abs)) || 1 : 1;
  const length = (j, value) =>
    lone ? Math.min(1, Math.abs(lone[j]) / largest) * Math.sign(value) : value / (view.standard ? most : size(j) || 1);
  if (view.sorted) order.sort((a, b) => difference(b) - difference(a) || a - b);
  if (!view.all) order = order.slice(0, FEW);
  // The digits of a row are those that its error, or else three digits of its largest number need.
  const told = (j, value) => {
    const large = size(j),
      error = view.standard ? null : (table.errors || {})[table.names[j]];
    if (large < 1e-4 || large >= 1e5) return number(value, 3);
    const digits = known(error) && error > 0 ? digitsOf(error) : digitsOf(large, 3);
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  };
  const names = nameColumn(order.map((j) => table.names[j]), width);
  const { left } = names;
  // Columns are wrapped, or on a phone, where many would make a very long page, scrolled below the names.
  const fit = Math.max(1, Math.floor((width - left) / 124));
  const scrolled = width < 600 && Math.ceil(which.length / fit) * (order.length + 3) > 120;
  const perBand = scrolled ? which.length : Math.min(fit, which.length);
  const step = scrolled ? 108 : Math.min(280, (width - left) / Math.max(1, perBand));
  const [top, tall] = [46, 22];
  const full = scrolled ? Math.ceil(left + step * which.length) : width,
    band = top + tall * order.length + 16,
    bands = Math.max(1, Math.ceil(which.length / Math.max(1, perBand))),
    height = band * bands;
  const most = Math.max(...order.map(size), 0) || 1;
  const chart = drawing(full, height, `Coefficients of the ${word}s at this pull`);
  const fixed = shape("g", { class: "fixed" });
  if (scrolled) fixed.append(shape("rect", { x: 0, y: 0, width: left - 6, height, class: "cover" }));
  for (let b = 0; b < bands; b += 1) {
    for (let k = 0; k < order.length; k += 2)
      chart.append(shape("rect", { x: 0, y: band * b + top + tall * k, width: full, height: tall, class: "stripe" }));
    fixed.append(...names.draw(band * b + top, tall));
  }
  which.forEach((k, position) => {
    const slot = slotOf(k),
      x = left + step * (position % perBand),
      start = band * Math.floor(position / perBand) + top,
      bar = (step - 66) / 2,
      zero = x + 6 + bar;
    const members = clusters().get(k) || [];
    const away = members.length > 0 && members.every(dimmed);
    const column = shape(
      "g",
      { class: away ? "dim" : "", "data-cluster": k },
      shape("path", {
        d: outline(slot, 5),
        transform: `translate(${x + 12},${start - 30})`,
        class: `mark ${hue(slot)}`,
      }),
      shape(
        "text",
        { x: x + 23, y: start - 26, class: "strong", text: trimmed(title(k, members), Math.floor((step - 30) / 7)) },
        shape("title", { text: title(k, members) }),
      ),
      shape("text", {
        x: x + 23,
        y: start - 10,
        class: "soft",
        text: members.length > 1 ? plural(members.length, noun) : "",
      }),
      shape("line", { x1: zero, x2: zero, y1: start, y2: start + tall * order.length, class: "rule" }),
    );
    order.forEach((j, i) => {
      // What is left of a zero by rounding is shown as zero.
      const exact = rows[position][j],
        value = Math.abs(exact) < (!view.standard ? 0 : 1e-12 * most) ? 0 : exact;
      if (!Number.isFinite(value)) return;
      const long = length(j, value) * bar,
        y = start + tall * i;
      column.append(
        shape("rect", {
          x: Math.min(zero, zero + long),
          width: Math.max(0.5, Math.abs(long)),
          y: y + 5,
          height: tall - 10,
          rx: 1.5,
          class: `bar ${hue(slot)}`,
        }),
        shape("text", { x: x + step - 6, y: y + 15, "text-anchor": "end", class: "value", text: told(j, value) }),
      );
    });
    chart.append(column);
  });
  chart.append(fixed);
  return chart;
}

const CHANGED = { classification: " in log odds", counts: " in the logarithm of the mean" };

function coefficientsLead() {
  const shown = shownGroups().length,
    all = (points[state.at] || {}).n_clusters;
  const centres = sharing.startsWith("personal");
  const clustering = doc.task === "clustering";
  const what = separate(all) ? `models of ${nouns}` : centres ? `centres of ${word}s` : `${word}s`;
  const which =
    all === 1
      ? users.length === 1
        ? `The model of the ${noun}`
        : `The ${centres ? "centre" : "model"} that all ${nouns} share at this pull`
      : known(all) && shown < all
        ? `The first ${integer(shown)} of ${integer(all)} ${what} at this lam, by size`
        : `All ${what} at this pull`;
  const averaged = doc.curves ? " These are of the one kind that was chosen; an average predicts." : "";
  return !view.standard
    ? `${which}, in the units of the table${doc.task === "clustering" ? "" : ": what one more unit changes"}${CHANGED[doc.task] || ""}. ` +
        (table.which[state.at].length === 1 && table.standardized
          ? "Bars: how much the columns weigh, as standard deviations."
          : "Every row has a scale of its own.") +
        averaged
    : `${which}, for standardised columns: all bars are on one scale. ` +
        (clustering
          ? "A coordinate is a distance from the mean of all points, in standard deviations of its feature."
          : "A coefficient is the effect of one standard deviation of its feature" +
            `${doc.task === "regression" ? ", in standard deviations of the target" : ""}.`);
}

export function setUpCoefficients() {
  const section = byId("coefficients");
  if (!table || !table.clusters || !table.names || !table.which) {
    section.hidden = true;
    return;
  }
  const body = section.querySelector(".body");
  const tools = element("div", { class: "tools" });
  let holder = null;
  const lead = () => {
    const count = (points[state.at] || {}).n_clusters;
    section.querySelector("h2").textContent =
      count === 1
        ? users.length === 1
          ? `The ${noun}'s model`
          : `The ${sharing.startsWith("personal") ? "centre" : "model"} that all ${nouns} share`
        : `The ${separate(count) ? noun : word}s' ${doc.task === "clustering" ? "centres" : "models"} side by side`;
    byId("coefficients-lead").textContent = coefficientsLead();
  };
  if (table.outputs && table.outputs.length > 1) {
    const choice = element(
      "select",
      {
        id: "output",
        onchange: () => {
          view.output = Number(choice.value);
          holder.redraw();
        },
      },
      ...table.outputs.map((name, k) => element("option", { value: k, text: name })),
    );
    tools.append(element("label", {}, "Output ", choice));
  }
  const toggle = (id, text, key) => {
    const box = element("input", {
      type: "checkbox",
      id,
      onchange: () => {
        view[key] = box.checked;
        holder.redraw();
        lead();
      },
    });
    tools.append(element("label", {}, box, ` ${text}`));
  };
  if (table.standardized) toggle("standard-units", "Standardised, on one scale", "standard");
  const most = Math.max(...table.which.map((which) => which.length));
  if (most > 1) toggle("sort-coefficients", "Largest differences first", "sorted");
  if (table.names.length > FEW) toggle("all-coefficients", `All ${integer(table.names.length)} coefficients`, "all");
  if (most > FEW) toggle("all-groups", `All columns, more than ${FEW}`, "everyGroup");
  body.append(tools);
  holder = figure(body, {
    name: "coefficients",
    title: doc.task === "clustering" ? "Centres" : "Coefficients",
    draw: drawCoefficients,
    rows: () => {
      const which = table.which[state.at] || [],
        kept = view.output;
      const outputs = table.outputs || [null];
      const rows = outputs.flatMap((output, o) => {
        view.output = o;
        const models = which.map((_, position) => coefficientRow(state.at, position));
        return table.names.map((name, j) => [
          ...(output === null ? [] : [output]),
          name,
          ...models.map((row) => single(row[j])),
        ]);
      });
      view.output = kept;
      const titles = which.map((k) => title(k, clusters().get(k) || []));
      return [[...(table.outputs ? ["output"] : []), "coefficient", ...titles], ...rows];
    },
  });
  holder.slot.classList.add("wide");
  holder.slot.setAttribute("tabindex", "0");
  holder.slot.setAttribute("role", "region");
  holder.slot.setAttribute("aria-label", "Coefficients");
  holder.slot.addEventListener("scroll", () => {
    const fixed = holder.slot.querySelector(".fixed");
    if (fixed) fixed.setAttribute("transform", `translate(${holder.slot.scrollLeft},0)`);
  });
  views.push(lead);
}

// How personal --------------------------------------------------------------------------------------------------------

const PARTS = [
  ["shared", "shared by all"],
  ["groups", "differs between groups"],
  ["personal", "personal"],
];

/** Coefficients in the order of the table, or, of many, those that differ most. */
function sharesShown() {
  const { names, groups, personal } = doc.shares;
  const order = [...names.keys()];
  if (names.length <= FEW) return order;
  return order.sort((a, b) => groups[b] + personal[b] - groups[a] - personal[a]).slice(0, FEW);
}
const partsOf = (j) => PARTS.map(([key]) => doc.shares[key][j]);
/** The parts that there are, up to rounding. */
const partsUsed = () =>
  PARTS.filter(([key]) => doc.shares[key].some((x, j) => x > 1e-9 * partsOf(j).reduce((sum, part) => sum + part, 0)));

function drawShares(width) {
  const order = sharesShown(),
    used = partsUsed();
  const names = nameColumn(order.map((j) => doc.shares.names[j]), width);
  const narrow = width < 560;
  const [tall, right, top] = [26, width - 64, narrow ? 26 + 20 * used.length : 46];
  const { left } = names;
  const height = top + tall * order.length + 6;
  const chart = drawing(width, height, "How personal each coefficient is");
  let x = left;
  used.forEach(([key, text], k) => {
    const [at, y] = narrow ? [left, 2 + 20 * k] : [x, 2];
    chart.append(
      shape("rect", { x: at, y, width: 14, height: 14, rx: 2, class: `share ${key}` }),
      shape("text", { x: at + 20, y: y + 11, text }),
    );
    x += 40 + 7 * text.length;
  });
  chart.append(shape("text", { x: width, y: top - 8, "text-anchor": "end", class: "soft", text: "spread" }));
  chart.append(...names.draw(top, tall));
  order.forEach((j, k) => {
    const parts = partsOf(j),
      total = parts.reduce((sum, part) => sum + part, 0) || 1,
      y = top + tall * k;
    let start = left;
    PARTS.forEach(([key], m) => {
      const wide = ((right - left) * parts[m]) / total;
      if (!(wide > 0)) return;
      chart.append(shape("rect", { x: start, y: y + 3, width: wide, height: tall - 8, class: `share ${key}` }));
      if (wide > 42)
        chart.append(
          shape("text", { x: start + 8, y: y + 16, class: `inside ${key}`, text: percent(parts[m] / total) }),
        );
      start += wide;
    });
    const spread = Math.sqrt(parts[1] + parts[2]);
    chart.append(
      shape("text", { x: width, y: y + 16, "text-anchor": "end", class: "value", text: number(spread, 2) }),
    );
  });
  return chart;
}

export function setUpShares() {
  const section = byId("personal");
  if (!doc.shares) {
    section.hidden = true;
    return;
  }
  const { names, groups, personal } = doc.shares;
  if (sharing === "groups") section.querySelector("h2").textContent = "How much each coefficient differs between groups";
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const share = sum(personal) / (sum(groups) + sum(personal) || 1);
  byId("personal-lead").textContent = {
    groups:
      "The users of a group have the same model, so all differences between users are differences between groups.",
    personal: "Every user has a model of its own around one centre.",
    "personal in groups":
      `Of all differences between the users' models, ${percent(share)} are personal: differences from the centre of ` +
      `the group. The other ${percent(1 - share)} are differences between groups.`,
    alone:
      "Every user has a model from its own rows only. What looks personal includes the error of estimating it from " +
      "few rows.",
  }[sharing];
  figure(section.querySelector(".body"), {
    name: "shares",
    title: "How personal each coefficient is",
    draw: drawShares,
    note:
      (names.length > FEW
        ? `The ${FEW} of ${integer(names.length)} coefficients that differ most between users. `
        : "") +
      "The mean over users of a coefficient's square, in parts: the square of its mean, which all users share; the " +
      `variance between ${word}s; and the variance within ${word}s, which is personal. ` +
      "Spread: the standard deviation between users. For standardised features.",
    rows: () => [
      ["coefficient", ...PARTS.map(([, text]) => text)],
      ...names.map((name, j) => [name, ...partsOf(j)]),
    ],
  });
}
