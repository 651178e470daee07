// What users share, and the evidence for it: kinds of models on rows left out, stability, held-out gain.

import { byId, element, known, number, percent, plural, integer } from "./basics.js";
import { chosen, clusters, doc, glyph, naming, scores, slotOf, word } from "./model.js";

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

function stabilityTable({ groups }) {
  const rows = groups.map((stays, k) => {
    const members = clusters(chosen).get(k) || [];
    const name = element("span", { class: "tag" });
    name.append(glyph(slotOf(k, chosen)), naming(k));
    return { cells: [name, integer(members.length), percent(stays)] };
  });
  const shown = doc.reduced ? "Users shown" : "Users";
  return evidenceTable("stability", [word === "group" ? "Group" : "Cluster", shown, "Stay"], rows);
}

export function setUpEvidence() {
  const section = byId("evidence"),
    groups = doc.groups || {},
    { stability, held_out: heldOut } = groups;
  const body = section.querySelector(".body");
  const compared = Object.keys(groups.compared || {}).length > 1;
  if (!compared && !stability && !heldOut) {
    section.hidden = true;
    return;
  }
  const lead = [];
  if (stability) {
    const searched = known(stability.searched)
      ? `, ${stability.searched.toFixed(2)} for a new search without the held-out rows`
      : "";
    lead.push(
      `The ${word}s are ${stability.stable ? "stable" : "unstable"}: the adjusted Rand index between them and the ` +
        `${word}s with other rows is ${stability.index.toFixed(2)}${searched} (1: the same, 0: chance).`,
    );
  }
  if (heldOut && known(heldOut.gain)) {
    const error = known(heldOut.error) ? ` (standard error ${number(heldOut.error, 2)})` : "";
    const better = heldOut.gain >= 0 ? "better" : "worse";
    const metric = (scores && scores.metric) || "score";
    lead.push(
      `On ${integer(heldOut.rows)} held-out rows the ${metric} is ${better} than that of each user's own model by ` +
        `${number(Math.abs(heldOut.gain), 2)}${error}, as a mean over users. ` +
        `${integer(heldOut.worse)} of ${plural(heldOut.users, "user")} ` +
        `${heldOut.worse === 1 ? "is" : "are"} worse off than alone by more than chance.`,
    );
  }
  byId("evidence-lead").textContent = lead.join(" ");
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
  if (stability)
    pair.append(
      element(
        "div",
        {},
        stabilityTable(stability),
        element("p", { class: "note", text: "How often users stay in their group when half of all rows are drawn." }),
      ),
    );
  if (pair.children.length) body.append(pair);
}
