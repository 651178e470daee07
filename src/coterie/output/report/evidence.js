// What users share, and the evidence for it: kinds of models on rows left out, stability, held-out gain.

import { byId, element, known, number, percent, plural, trimmed, integer } from "./basics.js";
import { chosen, clusters, doc, everyone, glyph, naming, noun, scores, slotOf, users, word } from "./model.js";

const KIND_NAMES = {
  "one model": "One model for all",
  groups: "One model per group",
  personal: "Personal models around one centre",
  "personal in groups": "Personal models around the centre of each group",
  alone: "Everyone alone",
};

export function evidenceTable(id, heads, rows) {
  const cell = (entry, k) => {
    const node = k ? element("td", { class: "figure" }) : element("th", { scope: "row" });
    node.append(entry);
    return node;
  };
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
  const rows = Object.entries(compared).map(([name, loss]) => {
    const same = name === kind,
      difference = loss - compared[kind];
    return {
      strong: same,
      cells: [
        `${KIND_NAMES[name] || name}${same ? " (chosen)" : ""}`,
        number(loss, 3),
        same || !known(difference)
          ? "–"
          : `${difference > 0 ? "+" : ""}${number(difference, 2)}` +
            (known(errors[name]) ? ` ± ${number(errors[name], 2)}` : ""),
      ],
    };
  });
  return evidenceTable("kinds", ["Kind of models", "Mean loss", "Difference"], rows);
}

function heldOutTable({ means, gain, error, over_together: overTogether }) {
  const score = (x, digits = 2) =>
    scores && scores.metric === "accuracy" ? `${(100 * x).toFixed(1)}%` : number(x, digits);
  const better = (value, deviation) =>
    value === 0 && deviation === 0
      ? "the same"
      : known(value)
        ? `${value > 0 ? "+" : ""}${score(value)}${known(deviation) ? ` ± ${score(deviation)}` : ""}`
        : "–";
  const names = ["These models", "Users' own models", "One model for all"];
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
  byId("groups").textContent = groups.sentence || "";
  const more = groups.sentence && groups.sentence !== (doc.headline || {}).sure && everyone > 1;
  if (!compared && !heldOut && !more) {
    section.hidden = true;
    return;
  }
  // The headline has this already, where there is one.
  if (heldOut && known(heldOut.gain) && groups.kind !== "alone" && !(doc.headline || {}).helps) {
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
            "Losses on rows that were left out to choose the kind; smaller is better. Differences are from the chosen " +
            "kind, ± their standard error over users. Of kinds that are about as good, the simplest is chosen.",
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
