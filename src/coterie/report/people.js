// The users one by one, their scores together, and the models of their clusters.

import {
  bottomAxis, byId, drawing, element, figure, known, linear, mean, number, percent, plural, saveCsv, shape, single,
  ticks, trimmed, unpack, integer,
} from "./basics.js";
import {
  clusters, dimmed, doc, glyph, hue, labelOf, labels, naming, outline, points, scoreOf, scores, sizeOf, slotOf, state,
  users, views, word,
} from "./model.js";
import { pick } from "./map.js";

const PAGE = 50;
const roster = { sort: "user", down: false, query: "", page: 0 };

function columns() {
  const metric = scores ? scores.metric : "score";
  const all = [
    { key: "user", name: "User", value: (user) => users[user] },
    { key: "cluster", name: word === "group" ? "Group" : "Cluster", value: (user) => labelOf(user), skip: !labels },
    { key: "size", name: doc.reduced ? "Size (shown)" : "Size", value: (user) => sizeOf(user), skip: !labels },
    {
      key: "stays",
      name: "Stays in group",
      value: (user) => doc.groups.stays[user],
      skip: !doc.groups || !doc.groups.stays,
    },
    { key: "rows", name: "Rows", value: (user) => (doc.counts || [])[user], skip: !doc.counts },
    { key: "here", name: `${metric} here`, value: (user) => scoreOf("points", user), skip: !scores || !scores.points },
    { key: "alone", name: `${metric} alone`, value: (user) => scoreOf("alone", user), skip: !scores || !scores.alone },
    {
      key: "together",
      name: `${metric} together`,
      value: (user) => scoreOf("together", user),
      skip: !scores || !scores.together,
    },
  ];
  return all.filter((column) => !column.skip);
}

const inOrder = new Intl.Collator("en", { numeric: true });

/** The users the table is about now, in its order; unknown values come last whichever way it is sorted. */
function listed() {
  const query = roster.query.trim().toLowerCase();
  const matching = [...users.keys()].filter(
    (user) => !dimmed(user) && (!query || users[user].toLowerCase().includes(query)),
  );
  const column = columns().find(({ key }) => key === roster.sort) || columns()[0];
  const sign = roster.down ? -1 : 1;
  const values = new Map(matching.map((user) => [user, column.value(user)]));
  return matching.sort((a, b) => {
    const [x, y] = [values.get(a), values.get(b)];
    if (typeof x === "string") return sign * inOrder.compare(x, y) || a - b;
    if (!known(x) || !known(y)) return known(y) - known(x) || a - b;
    return sign * (x - y) || a - b;
  });
}

function tableRow(user, shown) {
  const shared = scoreOf("points", user),
    alone = scoreOf("alone", user);
  return element(
    "tr",
    { "data-user": user },
    ...shown.map(({ key, value }) => {
      const entry = value(user);
      if (key === "user") return element("th", { scope: "row", text: entry });
      if (key === "cluster") {
        const k = labelOf(user),
          members = clusters().get(k);
        return element(
          "td",
          {},
          element(
            "button",
            {
              type: "button",
              class: "tag",
              onclick: () => pick(k, members),
              "aria-label": `Select ${naming(k)}, ${plural(members.length, "user")}`,
            },
            glyph(slotOf(k)),
            String(entry),
          ),
        );
      }
      const cellNode = element("td", {
        class: "figure",
        text: key === "size" || key === "rows" ? integer(entry) : key === "stays" ? percent(entry) : number(entry, 3),
      });
      if (key === "here" && known(shared) && known(alone) && shared !== alone) {
        const better = scores.larger === false ? shared < alone : shared > alone;
        cellNode.append(
          element("span", {
            class: better ? "up" : "down",
            title: better ? "better than alone" : "worse than alone",
            "aria-label": better ? "better than alone" : "worse than alone",
            role: "img",
            text: better ? " ▲" : " ▼",
          }),
        );
      }
      return cellNode;
    }),
  );
}

export function setUpTable() {
  const section = byId("users");
  if (!users.length) {
    section.hidden = true;
    return;
  }
  const shown = columns();
  const search = element("input", {
    type: "search",
    id: "search",
    placeholder: "Find a user",
    "aria-label": "Find a user by name",
    autocomplete: "off",
    spellcheck: "false",
  });
  const body = element("tbody", {});
  const heads = shown.map(({ key, name }) =>
    element(
      "th",
      { scope: "col", "data-column": key, class: key === "user" || key === "cluster" ? "" : "figure" },
      element("button", {
        type: "button",
        text: name,
        onclick: () => {
          roster.down = roster.sort === key ? !roster.down : false;
          roster.sort = key;
          roster.page = 0;
          draw();
        },
      }),
    ),
  );
  const count = element("span", { id: "count", "aria-live": "polite" });
  const turn = (text, label, step) =>
    element("button", {
      type: "button",
      text,
      "aria-label": label,
      class: "small turn",
      onclick: () => {
        roster.page += step;
        draw();
      },
    });
  const [back, forth] = [turn("←", "Previous page of users", -1), turn("→", "Next page of users", 1)];
  const table = () => [shown.map(({ name }) => name), ...listed().map((user) => shown.map(({ value }) => value(user)))];
  section.querySelector(".body").append(
    element(
      "div",
      { class: "tools" },
      search,
      element("span", { class: "pages" }, back, count, forth),
      element("button", {
        type: "button",
        class: "small",
        text: "CSV",
        "data-download": "users-csv",
        "aria-label": "Download the users listed",
        onclick: () => saveCsv(table(), "users"),
      }),
    ),
    element(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of users" },
      element("table", { id: "roster" }, element("thead", {}, element("tr", {}, ...heads)), body),
    ),
  );

  function draw() {
    const rows = listed();
    const pages = Math.max(1, Math.ceil(rows.length / PAGE));
    roster.page = Math.min(Math.max(roster.page, 0), pages - 1);
    const start = roster.page * PAGE,
      end = Math.min(rows.length, start + PAGE);
    body.replaceChildren(...rows.slice(start, end).map((user) => tableRow(user, shown)));
    heads.forEach((head, k) => {
      const sorted = shown[k].key === roster.sort;
      head.setAttribute("aria-sort", sorted ? (roster.down ? "descending" : "ascending") : "none");
    });
    count.textContent =
      rows.length > PAGE
        ? `${integer(start + 1)} to ${integer(end)} of ${integer(rows.length)}`
        : plural(rows.length, "user");
    back.hidden = forth.hidden = pages === 1;
    back.disabled = roster.page === 0;
    forth.disabled = roster.page === pages - 1;
  }
  search.addEventListener("input", () => {
    roster.query = search.value;
    roster.page = 0;
    draw();
  });
  views.push(() => {
    byId("users-lead").textContent = state.selected
      ? `The ${plural(state.selected.size, "selected user")} only; clear the selection to see all.`
      : labels
        ? ((doc.groups && doc.groups.kind) || "").startsWith("personal")
          ? `Users with the same number share exactly the same centre at this lam; every user has a model of its own.`
          : `Users with the same number share exactly the same model at this lam.`
        : "";
    draw();
  });
}

// Scores ------------------------------------------------------------------------------------------------------------

const SORTS = [
  ["points", "here"],
  ["alone", "alone"],
  ["together", "together"],
];

function quantile(sorted, share) {
  const at = (sorted.length - 1) * share,
    low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}

function drawScores(width) {
  const kinds = SORTS.filter(([kind]) => scores[kind]);
  const tall = width < 420 ? 88 : 108,
    top = 8,
    left = width < 420 ? 76 : 88,
    right = width - 16,
    bottom = top + tall * kinds.length,
    height = bottom + 40;
  let low = Infinity,
    high = -Infinity;
  for (const [kind] of kinds)
    for (const x of scores[kind].values)
      if (Number.isFinite(x)) {
        low = Math.min(low, x);
        high = Math.max(high, x);
      }
  if (!(low <= high)) {
    low = 0;
    high = 1;
  }
  const pad = (high - low) * 0.04 || 0.05;
  const scale = linear(low - pad, high + pad, left, right);
  const chart = drawing(width, height, `${scores.metric} of every user: here, alone and together`);
  chart.append(bottomAxis(scale, ticks(low, high, (right - left) / 70), bottom, left, right, scores.metric));
  kinds.forEach(([kind, name], k) => {
    const middle = top + tall * (k + 0.5);
    const values = [...users.keys()]
      .filter((user) => !dimmed(user))
      .map((user) => scoreOf(kind, user))
      .filter(known)
      .sort((a, b) => a - b);
    const group = shape(
      "g",
      { class: `strip ${k ? "" : "first"}`, "data-kind": kind },
      shape("text", { x: 0, y: middle - 2, class: "strong", text: name }),
    );
    chart.append(group);
    if (!values.length) {
      group.append(shape("text", { x: 0, y: middle + 13, class: "soft", text: "unknown" }));
      return;
    }
    const average = mean(values);
    group.append(
      shape("text", { x: 0, y: middle + 13, class: "soft", "data-mean": average, text: `mean ${number(average, 3)}` }),
    );
    // Equal scores are stacked: the width of the pile is how many have that score.
    const wide = values.length > 300 ? 3 : 5,
      piles = new Map();
    for (const x of values) {
      const bin = Math.round(scale(x) / wide);
      piles.set(bin, (piles.get(bin) || 0) + 1);
    }
    const step = Math.min(wide, (tall - 22) / Math.max(...piles.values()));
    const r = wide * 0.42;
    let d = "";
    for (const [bin, many] of piles)
      for (let i = 0; i < many; i += 1) {
        const y = middle + (i - (many - 1) / 2) * step;
        d += `M${(bin * wide - r).toFixed(1)},${y.toFixed(1)}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`;
      }
    const [q1, q2, q3] = [0.25, 0.5, 0.75].map((share) => scale(quantile(values, share)));
    group.append(
      shape("rect", {
        x: q1,
        width: Math.max(1, q3 - q1),
        y: middle - tall / 2 + 8,
        height: tall - 16,
        rx: 3,
        class: "quarters",
      }),
      shape("path", { d, class: "dots" }),
      shape("line", { x1: q2, x2: q2, y1: middle - tall / 2 + 8, y2: middle + tall / 2 - 8, class: "median" }),
      shape("path", {
        d: "M0,-6L6,0L0,6L-6,0z",
        transform: `translate(${scale(average)},${middle})`,
        class: "average",
      }),
    );
  });
  return chart;
}

function verdict() {
  let better = 0,
    worse = 0,
    same = 0;
  users.forEach((_, user) => {
    const [shared, alone] = [scoreOf("points", user), scoreOf("alone", user)];
    if (dimmed(user) || !known(shared) || !known(alone)) return;
    if (shared === alone) same += 1;
    else if (shared > alone === (scores.larger !== false)) better += 1;
    else worse += 1;
  });
  const all = better + worse + same;
  if (!all) return "";
  const who = plural(all, state.selected ? "selected user" : "user");
  return (
    `At this lam ${integer(better)} of ${who} (${percent(better / all)}) score better than with a model of their own, ` +
    `${integer(same)} the same and ${integer(worse)} worse.`
  );
}

export function setUpScores() {
  const section = byId("scores");
  if (!scores || !scores.points) {
    section.hidden = true;
    return;
  }
  figure(section.querySelector(".body"), {
    name: "scores",
    title: `${scores.metric}, user by user`,
    draw: drawScores,
    note: ["Diamond: mean. Line: median. Shaded: the middle half of the users.", scores.note || ""]
      .filter(Boolean)
      .join(" "),
    rows: () => [
      ["user", `${scores.metric} here`, "alone", "together"],
      ...users.map((name, user) => [name, ...SORTS.map(([kind]) => scoreOf(kind, user))]),
    ],
  });
  views.push(() => {
    byId("scores-lead").textContent = verdict();
  });
}

// Coefficients ------------------------------------------------------------------------------------------------------

const table = doc.coefficients ? { ...doc.coefficients, clusters: unpack(doc.coefficients.clusters) } : null;
const FEW = 24;
const view = { output: 0, all: false, sorted: false };

function coefficientRow(at, position) {
  const names = table.names,
    outputs = table.outputs ? table.outputs.length : 1;
  let row = position;
  for (let k = 0; k < at; k += 1) row += table.which[k].length;
  const start = row * names.length * outputs;
  return names.map((_, j) => table.clusters.values[start + j * outputs + view.output]);
}

function drawCoefficients(width) {
  const which = table.which[state.at] || [];
  const rows = which.map((_, position) => coefficientRow(state.at, position));
  let order = [...table.names.keys()];
  const spread = (j) => Math.max(...rows.map((row) => row[j])) - Math.min(...rows.map((row) => row[j]));
  if (view.sorted) order.sort((a, b) => spread(b) - spread(a) || a - b);
  if (!view.all) order = order.slice(0, FEW);
  const longest = order.reduce((most, j) => Math.max(most, table.names[j].length), 4);
  const left = Math.min(width * 0.34, 14 + 6.6 * Math.min(longest, 26)),
    room = Math.floor((left - 14) / 6.2);
  const step = Math.max(96, Math.min(220, (width - left) / Math.max(1, which.length)));
  const full = Math.max(width, left + step * which.length),
    top = 44,
    tall = 22,
    height = top + tall * order.length + 12;
  const most = rows.flat().reduce((high, x) => (known(x) ? Math.max(high, Math.abs(x)) : high), 0) || 1;
  const chart = drawing(full, height, `Coefficients of the ${word}s at this lam`);
  order.forEach((j, k) => {
    const y = top + tall * k,
      name = table.names[j];
    if (k % 2 === 0) chart.append(shape("rect", { x: 0, y, width: full, height: tall, class: "stripe" }));
    chart.append(
      shape(
        "text",
        {
          x: left - 10,
          y: y + 15,
          "text-anchor": "end",
          class: "feature",
          text: trimmed(name, room),
        },
        shape("title", { text: name }),
      ),
    );
  });
  which.forEach((k, position) => {
    const slot = slotOf(k),
      x = left + step * position,
      bar = (step - 62) / 2,
      zero = x + 6 + bar;
    const members = clusters().get(k) || [];
    const away = members.length > 0 && members.every(dimmed);
    const column = shape(
      "g",
      { class: away ? "dim" : "", "data-cluster": k },
      shape("path", { d: outline(slot, 5), transform: `translate(${x + 12},14)`, class: `mark ${hue(slot)}` }),
      shape("text", { x: x + 23, y: 18, class: "strong", text: naming(k) }),
      shape("text", { x: x + 23, y: 33, class: "soft", text: members.length ? plural(members.length, "user") : "" }),
      shape("line", { x1: zero, x2: zero, y1: top, y2: height - 12, class: "rule" }),
    );
    order.forEach((j, i) => {
      const value = rows[position][j];
      if (!Number.isFinite(value)) return;
      const long = (value / most) * bar,
        y = top + tall * i;
      column.append(
        shape("rect", {
          x: Math.min(zero, zero + long),
          width: Math.max(0.5, Math.abs(long)),
          y: y + 5,
          height: tall - 10,
          rx: 1.5,
          class: `bar ${hue(slot)}`,
        }),
        shape("text", { x: x + step - 6, y: y + 15, "text-anchor": "end", class: "value", text: number(value, 3) }),
      );
    });
    chart.append(column);
  });
  return chart;
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
      },
    });
    tools.append(element("label", {}, box, ` ${text}`));
  };
  toggle("sort-coefficients", "Largest differences first", "sorted");
  if (table.names.length > FEW) toggle("all-coefficients", `All ${integer(table.names.length)} coefficients`, "all");
  body.append(tools);
  holder = figure(body, {
    name: "coefficients",
    title: "Coefficients",
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
      return [[...(table.outputs ? ["output"] : []), "coefficient", ...which.map(naming)], ...rows];
    },
  });
  holder.slot.classList.add("wide");
  holder.slot.setAttribute("tabindex", "0");
  holder.slot.setAttribute("role", "region");
  holder.slot.setAttribute("aria-label", "Coefficients");
  views.push(() => {
    const shown = (table.which[state.at] || []).length,
      all = (points[state.at] || {}).n_clusters;
    byId("coefficients-lead").textContent =
      known(all) && shown < all
        ? `The ${integer(shown)} largest of ${integer(all)} ${word}s at this lam, on one scale.`
        : `All ${word}s at this lam, on one scale.`;
  });
}
