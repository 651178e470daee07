// What users share, and the evidence for it: kinds of models on rows left out, stability, held-out gain.

import {
  bottomAxis, byId, digitsOf, drawing, element, explain, figure, known, leftAxis, linear, number, percent, plural,
  shape, ticks, trimmed, withError, integer,
} from "./basics.js";
import { chosen, clusters, doc, everyone, glyph, naming, noun, nouns, scores, slotOf, users, word } from "./model.js";

const KIND_NAMES = {
  "one model": "One model for all",
  groups: "One model per group",
  personal: "Personal models around one centre",
  "personal in groups": "Personal models around the centre of each group",
  alone: "Everyone alone",
};

export function evidenceTable(id, heads, rows) {
  const cell = ([entry, head], k) => {
    const node = k ? element("td", { class: "figure", "data-label": head }) : element("th", { scope: "row" });
    node.append(entry);
    return node;
  };
  rows = rows.map((row) => ({ ...row, cells: row.cells.map((entry, k) => [entry, heads[k]]) }));
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": heads[0] },
    element(
      "table",
      { id, class: "small-table" },
      element(
        "thead",
        {},
        element("tr", {}, ...heads.map((text, k) => element("th", { scope: "col", class: k ? "figure" : "", text }))),
      ),
      element(
        "tbody",
        {},
        ...rows.map((row) =>
          element("tr", { class: row.strong ? "strong-row" : "" }, ...row.cells.map(cell)),
        ),
      ),
    ),
  );
}

function kindsTable({ compared, errors = {}, kind }) {
  const sizes = Object.values(errors).filter((error) => known(error) && error > 0);
  const digits = sizes.length ? digitsOf(Math.min(...sizes)) : digitsOf(compared[kind] || 1, 3);
  const rows = Object.entries(compared).map(([name, loss]) => {
    const same = name === kind,
      difference = loss - compared[kind];
    return {
      strong: same,
      cells: [
        `${KIND_NAMES[name] || name}${same ? " (chosen)" : ""}`,
        known(loss) ? loss.toFixed(digits) : "–",
        same || !known(difference)
          ? "–"
          : withError(difference, errors[name]),
      ],
    };
  });
  return evidenceTable("kinds", ["Kind of models", "Expected loss", "Difference"], rows);
}

function heldOutTable({ means, gain, error, over_together: overTogether }) {
  const score = (x, digits = 2) =>
    scores && scores.metric === "accuracy" ? `${(100 * x).toFixed(1)}%` : number(x, digits);
  const better = (value, deviation) =>
    value === 0 && deviation === 0
      ? "the same"
      : known(value)
        ? scores && scores.metric === "accuracy"
          ? `${value > 0 ? "+" : ""}${score(value)}${known(deviation) ? ` ± ${score(deviation)}` : ""}`
          : withError(value, deviation)
        : "–";
  const names = ["These models", "Own models", "One model for all"];
  const gains = ["–", better(gain, error), better(...(overTogether || []))];
  const rows = names.map((name, k) => ({ strong: k === 0, cells: [name, score(means[k], 3), gains[k]] }));
  const metric = `Mean ${scores ? scores.metric : "score"}`;
  return evidenceTable("held-out", ["On held-out rows", metric, "Gain over it"], rows);
}

function stabilityTable({ groups }) {
  const stays = doc.groups.stays || [];
  const someLeave = stays.some((share) => share < 1);
  const rows = groups.map((share, k) => {
    const members = clusters(chosen).get(k) || [];
    const name = element("span", { class: "tag" });
    name.append(glyph(slotOf(k, chosen)), naming(k));
    const least = members.reduce((a, b) => (a === null || stays[b] < stays[a] ? b : a), null);
    const who = least === null || stays[least] >= 1 ? "–" : `${trimmed(users[least], 24)}, ${percent(stays[least])}`;
    return { cells: [name, integer(members.length), ...(someLeave ? [who] : []), percent(share)] };
  });
  const shown = doc.reduced ? "Users shown" : "Users";
  return evidenceTable("stays", ["Group", shown, ...(someLeave ? ["Least stable user"] : []), "Stay"], rows);
}

export function setUpStability() {
  const section = byId("stability"),
    { stability, stays = null } = doc.groups || {};
  if (!stability) {
    section.hidden = true;
    return;
  }
  const searched = known(stability.searched)
    ? `, ${stability.searched.toFixed(2)} for a new search without the held-out rows`
    : "";
  byId("stability-lead").textContent =
    `The ${word}s are ${stability.stable ? "stable" : "unstable"}: with other rows of the same users they agree by ` +
    `${stability.index.toFixed(2)}${searched}, where 1 means the same ${word}s and 0 chance (adjusted Rand index). ` +
    (stability.stable ? "" : `Do not read much into who is in which ${word}.`);
  const fact = (name, text) => element("div", {}, element("dt", { text: name }), element("dd", { text }));
  const body = section.querySelector(".body");
  const leave = stays ? stays.filter((share) => share < 0.75).length : 0;
  body.append(
    element(
      "dl",
      { class: "three" },
      fact("Agreement with other rows (index)", stability.index.toFixed(2)),
      fact("Agreement of a new search", known(stability.searched) ? stability.searched.toFixed(2) : "not known"),
      fact("Users who leave in more than a quarter of the draws", stays ? integer(leave) : "not known"),
    ),
    stabilityTable(stability),
    element("p", {
      class: "note",
      text:
        `Stay: how often the users of a ${word} stay in it when other rows of the same users are drawn several times. ` +
        "The number of every user is in the table of users.",
    }),
  );
}

export function setUpEvidence() {
  const section = byId("evidence"),
    groups = doc.groups || {},
    { held_out: heldOut } = groups;
  const body = section.querySelector(".body");
  const compared = Object.keys(groups.compared || {}).length > 1;
  section.querySelector("h2").textContent = `What ${nouns} share, and the evidence`;
  byId("groups").textContent = groups.sentence || "";
  const more = groups.sentence && groups.sentence !== (doc.headline || {}).sure && everyone > 1;
  if (!compared && !heldOut && !more) {
    section.hidden = true;
    return;
  }
  // The headline has this already, where there is one.
  if (heldOut && known(heldOut.gain) && groups.kind !== "alone" && !(doc.headline || {}).better) {
    const error = known(heldOut.error) ? ` (standard error ${number(heldOut.error, 2)})` : "";
    const better = heldOut.gain >= 0 ? "better" : "worse";
    const metric = (scores && scores.metric) || "score";
    byId("evidence-lead").textContent =
      `On ${integer(heldOut.rows)} held-out rows the ${metric} is ${better} than that of each user's own model by ` +
      `${number(Math.abs(heldOut.gain), 2)}${error}, as a mean over users. ` +
      `${integer(heldOut.worse)} of ${plural(heldOut.users, noun)} ` +
      `${heldOut.worse === 1 ? "is" : "are"} worse off than alone by more than chance.`;
  }
  const pair = element("div", { class: "columns evidence" });
  if (compared)
    pair.append(
      element(
        "div",
        {},
        kindsTable(groups),
        element("p", {
          class: "note",
          text:
            "What is expected on new rows, estimated from the rows of the fit (for very wide models measured on rows " +
            "left out); smaller is better. Differences are from the chosen kind, ± their standard error over " +
            `${nouns}. Of kinds that are about as good, the simplest is chosen.`,
        }),
      ),
    );
  if (heldOut && heldOut.means)
    pair.append(
      element(
        "div",
        {},
        heldOutTable(heldOut),
        element("p", {
          class: "note",
          text: "Scores of models fitted without these rows. Gains are means over users, ± their standard error.",
        }),
      ),
    );
  if (pair.children.length) body.append(pair);
}

// Intervals and probabilities -----------------------------------------------------------------------------------------

/** Shares that were told against how often it was so: on the diagonal both are the same. */
function drawReliability(width) {
  const side = Math.min(width, 460),
    [left, top, right, bottom] = [50, 24, side - 12, side - 46];
  const across = linear(0, 1, left, right),
    up = linear(0, 1, bottom, top);
  const chart = drawing(side, side, "How often it was so against the probability that was told");
  const values = [0, 0.25, 0.5, 0.75, 1];
  chart.append(
    leftAxis(up, values, left, right, "how often it was so", percent),
    bottomAxis(across, values, bottom, left, right, "probability that was told", percent),
    shape("line", { x1: left, y1: bottom, x2: right, y2: top, class: "chosen-line" }),
  );
  const bins = doc.checks.reliability;
  chart.append(
    shape("path", {
      d: bins.map(([told, seen], k) => `${k ? "L" : "M"}${across(told)},${up(seen)}`).join(""),
      class: "step thin",
    }),
  );
  for (const [told, seen, rows] of bins) {
    const reach = 2 * Math.sqrt(Math.max(seen * (1 - seen), 0.25 / rows) / rows);
    chart.append(
      shape("line", {
        x1: across(told),
        x2: across(told),
        y1: up(Math.max(0, seen - reach)),
        y2: up(Math.min(1, seen + reach)),
        class: "now-line",
      }),
      explain(shape("circle", { cx: across(told), cy: up(seen), r: 5, class: "dot now" }), () => [
        `told ${percent(told)}, was so ${percent(seen)}`,
        plural(rows, "row"),
      ]),
    );
  }
  return chart;
}

function drawCovered(width) {
  const { users: shares, level } = doc.checks;
  const seen = shares.filter(known);
  const [height, top, left, right] = [170, 24, 46, width - 12],
    bottom = height - 42;
  const bins = Array.from({ length: 11 }, () => 0);
  for (const x of seen) bins[Math.min(10, Math.floor(10 * x + 1e-9))] += 1;
  const across = linear(0, 11, left, right),
    up = linear(0, Math.max(...bins), bottom, top);
  const chart = drawing(width, height, `How many ${nouns} have which share of rows in their interval`);
  chart.append(leftAxis(up, ticks(0, Math.max(...bins), 3).filter(Number.isInteger), left, right, nouns, integer));
  bins.forEach((many, k) => {
    const x = across(k) + 1;
    chart.append(
      shape("rect", {
        x,
        width: Math.max(1, across(k + 1) - x - 1),
        y: up(many),
        height: bottom - up(many),
        class: k >= 10 * level - 1e-9 ? "bar h0" : "bar alone",
      }),
    );
    if (k % 2 === 0 || width > 500)
      chart.append(
        shape("text", { x: (x + across(k + 1)) / 2, y: bottom + 15, "text-anchor": "middle", text: `${10 * k} %` }),
      );
  });
  chart.append(
    shape("text", { x: right, y: bottom + 33, "text-anchor": "end", class: "soft", text: "share of rows inside" }),
  );
  return chart;
}

export function setUpChecks() {
  const section = byId("checks"),
    checks = doc.checks;
  if (!checks) {
    section.hidden = true;
    return;
  }
  const body = section.querySelector(".body");
  section.querySelector("h2").textContent = checks.reliability
    ? "Whether probabilities are right"
    : "Whether intervals are right";
  if (checks.reliability) {
    byId("checks-lead").textContent =
      "Held-out rows that were told a probability, and how often it was so. On the dashed line both are the same.";
    figure(body, {
      name: "reliability",
      title: "Reliability",
      draw: drawReliability,
      note: "Each dot is as many held-out rows; bars are two standard errors.",
      rows: () => [["told", "was so", "rows"], ...checks.reliability],
    });
    return;
  }
  const few = checks.users.filter((x) => known(x) && x < checks.level - 0.2).length;
  byId("checks-lead").textContent =
    `Intervals of ${percent(checks.level)} hold ${percent(checks.mean)} of the held-out rows, as a mean over ${nouns} ` +
    `(median ${percent(checks.median)}). Below ${percent(checks.level - 0.2)}: ${plural(few, noun)}.`;
  figure(body, {
    name: "covered",
    title: `Share of held-out rows inside their interval, ${noun} by ${noun}`,
    draw: drawCovered,
    note: `The share of every ${noun} is in the table of ${nouns}; with few held-out rows it is coarse.`,
    rows: () => [[noun, "inside"], ...checks.users.map((x, k) => [users[k], x])],
  });
}
