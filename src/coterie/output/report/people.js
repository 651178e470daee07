// The users one by one, and their scores together.

import {
  bottomAxis, byId, digitsOf, drawing, element, figure, known, linear, mean, number, percent, plural, saveCsv, shape, ticks,
  integer,
} from "./basics.js";
import {
  chosen, clusters, dimmed, doc, glyph, labelOf, labels, naming, noun, nouns, points, scoreOf, scores, separate, sharing, sizeOf,
  slotOf, state, users, views,
} from "./model.js";
import { pick } from "./map.js";

const PAGE = 50;
const roster = { sort: "user", down: false, query: "", page: 0 };

/** Whether the models shown first share nothing, or all the same: then there are no groups to tell of. */
const shareless = Boolean(
  sharing && points.length && (points[chosen].n_clusters === 1 || separate(points[chosen].n_clusters)),
);

function columns() {
  const metric = scores ? scores.metric : "score";
  const all = [
    { key: "user", name: noun, value: (user) => users[user] },
    { key: "cluster", name: "Group", value: (user) => labelOf(user) + 1, skip: !labels || shareless },
    { key: "size", name: doc.reduced ? "Size (shown)" : "Size", value: (user) => sizeOf(user), skip: !labels || shareless },
    {
      key: "stays",
      name: "Stays in group",
      value: (user) => doc.groups.stays[user],
      skip: !doc.groups || !doc.groups.stays,
    },
    { key: "rows", name: "Rows", value: (user) => (doc.counts || [])[user], skip: !doc.counts },
    {
      key: "covered",
      name: "In interval",
      value: (user) => doc.checks.users[user],
      skip: !doc.checks || !doc.checks.users,
    },
    { key: "here", name: metric, value: (user) => scoreOf("points", user), skip: !scores || !scores.points },
    { key: "alone", name: `${metric}, own model`, value: (user) => scoreOf("alone", user), skip: !scores || !scores.alone },
    {
      key: "together",
      name: `${metric}, one model`,
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
    ...shown.map(({ key, name, value }) => {
      const entry = value(user);
      if (key === "user") return element("th", { scope: "row", text: entry });
      if (key === "cluster") {
        const k = labelOf(user),
          members = clusters().get(k);
        return element(
          "td",
          { "data-label": name },
          element(
            "button",
            {
              type: "button",
              class: "tag",
              onclick: () => pick(k, members),
              "aria-label": `Select ${naming(k)}, ${plural(members.length, noun)}`,
            },
            glyph(slotOf(k)),
            sharing && separate(points[state.at].n_clusters) ? "none" : String(entry),
          ),
        );
      }
      const cellNode = element("td", {
        class: "figure",
        "data-label": name,
        text:
          key === "size" || key === "rows"
            ? integer(entry)
            : key === "stays" || key === "covered"
              ? shareText(entry)
              : known(entry)
                ? entry.toFixed(decimals)
                : "–",
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

const shareText = (x) => (known(x) ? percent(x) : "–");
/** Scores have the same digits behind the point in every row: three of a typical one. */
const decimals = (() => {
  const all = scores && scores.points ? [...scores.points.values].filter((x) => Number.isFinite(x) && x !== 0) : [];
  const size = all.map(Math.abs).sort((a, b) => a - b)[Math.floor(all.length / 2)];
  return known(size) ? digitsOf(size, 3) : 2;
})();

export function setUpTable() {
  const section = byId("users");
  if (!users.length) {
    section.hidden = true;
    return;
  }
  const shown = columns();
  const every = nouns[0].toUpperCase() + nouns.slice(1);
  section.querySelector("h2").textContent = shareless ? every : `${every} and their groups`;
  const search = element("input", {
    type: "search",
    id: "search",
    placeholder: `Find a ${noun}`,
    "aria-label": `Find a ${noun} by name`,
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
        : plural(rows.length, noun);
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
    const alone = points.length && separate(points[state.at].n_clusters);
    const same = `${every} with the same number share exactly the same`;
    byId("users-lead").textContent = state.selected
      ? `The ${plural(state.selected.size, `selected ${noun}`)} only; clear the selection to see all.`
      : !labels
        ? ""
        : alone
          ? `Every ${noun} has a model of its own at this lam.`
          : sharing.startsWith("personal")
            ? `${same} centre at this lam; every user has a model of its own.`
            : `${same} model at this lam.`;
    draw();
  });
}

// Scores ------------------------------------------------------------------------------------------------------------

const SORTS = [
  ["points", "these models"],
  ["alone", "own models"],
  ["together", "one model"],
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
    left = width < 420 ? 96 : 106,
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
  const chart = drawing(width, height, `${scores.metric} of every user: these models, own models and one model for all`);
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
  const who = plural(all, state.selected ? `selected ${noun}` : noun);
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
      [noun, ...SORTS.map(([, name]) => `${scores.metric}, ${name}`)],
      ...users.map((name, user) => [name, ...SORTS.map(([kind]) => scoreOf(kind, user))]),
    ],
  });
  views.push(() => {
    byId("scores-lead").textContent = verdict();
  });
}
