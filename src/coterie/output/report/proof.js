// The certificate, the federated run, and the settings and explanations of the page.

import {
  bottomAxis, byId, bytes, drawing, element, explain, figure, known, leftAxis, linear, logarithmic, logTicks, number,
  roving, saveCsv, shape, ticks, integer,
} from "./basics.js";
import { evidenceTable } from "./evidence.js";
import { doc, lamAxis, lams, move, noun, nouns, points, sharing, state, views, word } from "./model.js";
import { nowLines, sides, spacedDown } from "./path.js";

const FLOOR = 1e-16;

function gapChart(width, { xs, scale, axis, gaps, label, now, onpress, lead }) {
  const [height, top, bottom] = [220, 24, 178];
  const [left, right] = sides(width);
  const values = gaps.filter(known).map((gap) => Math.max(gap, FLOOR));
  const low = values.reduce((a, b) => Math.min(a, b), 1) / 2;
  const high = values.reduce((a, b) => Math.max(a, b), low * 10) * 2;
  const y = logarithmic(low, high, bottom, top);
  const chart = drawing(width, height, label, Boolean(onpress));
  chart.append(leftAxis(y, spacedDown(logTicks(low, high, 5), y), left, right, "gap"), axis(bottom, left, right));
  if (lead) chart.append(lead(top, bottom));
  let d = "",
    open = false;
  gaps.forEach((gap, k) => {
    if (known(gap)) d += `${open ? "L" : "M"}${scale(xs[k]).toFixed(1)},${y(Math.max(gap, FLOOR)).toFixed(1)}`;
    open = known(gap);
  });
  chart.append(shape("path", { d, class: "step thin" }));
  const dots = gaps.map((gap, k) => {
    if (!known(gap) || gaps.length > 300) return null;
    const node = shape(
      "g",
      {
        class: onpress ? "press" : "",
        "data-key": `gap-${k}`,
        role: onpress ? "button" : "img",
        "aria-label": `gap ${number(gap, 2)}`,
      },
      shape("circle", { cx: scale(xs[k]), cy: y(Math.max(gap, FLOOR)), r: 10, class: "hit" }),
      shape("circle", {
        cx: scale(xs[k]),
        cy: y(Math.max(gap, FLOOR)),
        r: k === now ? 6 : 3,
        class: k === now ? "dot now" : "dot",
      }),
    );
    return explain(node, () => [`gap ${number(gap, 2)}`, `${onpress ? "lam" : "round"} ${number(xs[k])}`]);
  });
  const there = dots.map((node, k) => [node, k]).filter(([node]) => node);
  if (onpress)
    roving(
      there.map(([node]) => node),
      (k) => onpress(there[k][1]),
      there.findIndex(([, k]) => k === now),
    );
  chart.append(...there.map(([node]) => node));
  return chart;
}

function drawGaps(width) {
  const axis = lamAxis(...sides(width));
  return gapChart(width, {
    xs: lams,
    scale: axis.scale,
    gaps: points.map((point) => point.gap),
    label: "Certified gap at each lam",
    now: state.at,
    onpress: move,
    lead: (top, bottom) => nowLines(axis, top, bottom, true),
    axis: (bottom, left, right) => bottomAxis(axis.scale, axis.ticks, bottom, left, right, "lam"),
  });
}

function precise(x) {
  if (!known(x)) return "–";
  return x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e9) ? String(Number(x.toPrecision(10))) : x.toExponential(6);
}

/** What is proved about the groups, as far as anything is. */
function aboutGroups() {
  if (doc.bounds)
    return (
      "Recovery bounds are a separate statement: for lam between them theorems prove that the solution has these " +
      `${word}s; for other values they prove nothing.`
    );
  const weights = doc.groups && doc.groups.proposed ? `There are weights inside the ${word}s only. ` : "";
  return `${weights}The certificate is about this convex problem; it does not prove that the ${word}s are right.`;
}

export function setUpCertificate() {
  const section = byId("certificate");
  if (!points.length) {
    section.hidden = true;
    return;
  }
  const body = section.querySelector(".body");
  const value = () => element("dd", {});
  const [objective, bound, gap] = [value(), value(), value()];
  objective.id = "objective";
  bound.id = "bound";
  gap.id = "gap";
  const status = element("p", { class: "status", id: "status" });
  body.append(
    element(
      "dl",
      { class: "three" },
      element("div", {}, element("dt", { text: "Objective" }), objective),
      element("div", {}, element("dt", { text: "Lower bound" }), bound),
      element("div", {}, element("dt", { text: "Gap, relative" }), gap),
    ),
    status,
  );
  if (lams.length > 1 && points.some((point) => known(point.gap))) {
    figure(body, {
      name: "gaps",
      title: "Certified gap against lam",
      draw: drawGaps,
      rows: () => [
        ["lam", "objective", "bound", "gap", "status"],
        ...points.map((p, k) => [lams[k], p.objective, p.bound, p.gap, p.status]),
      ],
    });
  }
  if (doc.bounds && doc.bounds.sentence)
    body.append(element("p", { id: "bounds" }, element("b", { text: "Recovery. " }), doc.bounds.sentence));
  body.append(
    element("p", {
      class: "note",
      text:
        "The certificate does not depend on the solver: it is computed from the models and their duals alone. " +
        "No choice of models has an objective below the lower bound. The optimum lies between this bound and the " +
        `objective, so no other models can be better by more than the gap. ${aboutGroups()}`,
    }),
  );
  views.push(() => {
    const point = points[state.at] || {};
    objective.textContent = precise(point.objective);
    bound.textContent = precise(point.bound);
    gap.textContent = known(point.gap) ? number(point.gap, 2) : "not known";
    status.textContent = point.status || "";
    byId("certificate-lead").textContent = known(point.gap)
      ? `At lam = ${number(lams[state.at])} the objective is within ${number(point.gap, 2)} (relative) of the optimum.`
      : `At lam = ${number(lams[state.at])} nothing is certified.`;
  });
}

// The federated run -------------------------------------------------------------------------------------------------

function drawBytes(width) {
  const { rounds } = doc.federated;
  const [height, top, bottom] = [256, 60, 214];
  const [left, right] = sides(width);
  let [up, down] = [0, 0];
  const sums = rounds.map((r) => {
    up += r.bytes_up || 0;
    down += r.bytes_down || 0;
    return { round: r.round, up, down };
  });
  const most = Math.max(up, down, 1);
  const x = roundScale(left, right),
    y = linear(0, most * 1.05, bottom, top);
  const chart = drawing(width, height, "Bytes sent, summed over rounds");
  chart.append(leftAxis(y, ticks(0, most, 4), left, right, "total sent", bytes), roundAxis(bottom, left, right));
  // The legend is above the chart.
  for (const [key, name, style, y0] of [
    ["up", `users to server, ${bytes(up)}`, "step", 26],
    ["down", `server to users, ${bytes(down)}`, "step dashed", 44],
  ]) {
    chart.append(
      shape("path", {
        d: sums.map((sum, k) => `${k ? "L" : "M"}${x(sum.round).toFixed(1)},${y(sum[key]).toFixed(1)}`).join(""),
        class: style,
      }),
    );
    chart.append(
      shape("path", { d: `M${left + 10},${y0}h26`, class: style }),
      shape("text", { x: left + 43, y: y0 + 4, text: name }),
    );
  }
  return chart;
}

function roundScale(left, right) {
  const { rounds } = doc.federated;
  return linear(rounds[0].round, rounds[rounds.length - 1].round, left + 8, right - 8);
}
function roundAxis(bottom, left, right) {
  const { rounds } = doc.federated;
  const values = ticks(rounds[0].round, rounds[rounds.length - 1].round, (right - left) / 60).filter(Number.isInteger);
  return bottomAxis(roundScale(left, right), values, bottom, left, right, "round", integer);
}

/** What a private run promises, to whom, and what the certificate still proves. */
export function setUpPrivacy() {
  const section = byId("privacy");
  if (!doc.privacy) {
    section.hidden = true;
    return;
  }
  byId("privacy-lead").textContent = doc.privacy.sentence;
  const body = section.querySelector(".body");
  for (const [name, text] of doc.privacy.facts)
    body.append(element("p", {}, element("strong", { text: `${name}: ` }), text));
}

export function setUpFederated() {
  const section = byId("federated");
  if (!doc.federated) {
    section.hidden = true;
    return;
  }
  byId("federated-lead").textContent = doc.federated.sentence || "";
  const rounds = doc.federated.rounds || [];
  if (!rounds.length) return;
  const body = element("div", { class: "columns" });
  section.querySelector(".body").append(body);
  const rows = () => [
    ["round", "gap", "clusters", "bytes up", "bytes down", "answered"],
    ...rounds.map((r) => [r.round, r.gap, r.n_clusters, r.bytes_up, r.bytes_down, r.answered]),
  ];
  if (rounds.some((r) => known(r.gap))) {
    figure(body, {
      name: "rounds",
      title: "Gap after each round",
      rows,
      draw: (width) =>
        gapChart(width, {
          xs: rounds.map((r) => r.round),
          scale: roundScale(...sides(width)),
          gaps: rounds.map((r) => r.gap),
          label: "Gap after each round",
          now: -1,
          axis: roundAxis,
        }),
    });
  }
  figure(body, { name: "bytes", title: "Bytes sent", rows, draw: drawBytes });
  const kinds = Object.entries(doc.federated.kinds || {});
  if (kinds.length)
    body.append(
      evidenceTable(
        "bytes-by-kind",
        ["bytes by kind of question", "up", "down"],
        kinds.map(([kind, sizes]) => ({ cells: [ASKED[kind] || kind, bytes(sizes.up), bytes(sizes.down)] })),
      ),
    );
  if (rounds.every((r) => known(r.asked))) body.append(answersTable(rounds));
  const users = doc.federated.users || [];
  if (users.length)
    body.append(
      element(
        "p",
        {},
        "Bytes of every user: ",
        element("button", {
          type: "button",
          class: "small",
          text: "CSV",
          onclick: () =>
            saveCsv(
              [["user", "bytes up", "bytes down"], ...users.map((row, k) => [doc.users[k], ...row])],
              "participants",
            ),
        }),
      ),
    );
}

/** Who took part: the answers to each kind of question, over all its rounds. */
function answersTable(rounds) {
  const stages = new Map();
  for (const { stage, asked, answered } of rounds) {
    const [count, all, good] = stages.get(stage) || [0, 0, 0];
    stages.set(stage, [count + 1, all + asked, good + answered]);
  }
  return evidenceTable(
    "who-answered",
    ["who took part", "rounds", "asked", "answered"],
    [...stages].map(([stage, counts]) => ({ cells: [ASKED[stage] || stage, ...counts.map(integer)] })),
  );
}

/** What a kind of question asks for. */
const ASKED = {
  release: "noisy releases",
  home: "centres, to finish models at home",
  moments: "second moments of the rows",
  facts: "number, means and spreads of the rows",
  local: "local models",
  settle: "models from own rows",
  expand: "loss, gradient and Hessian",
  slopes: "loss and gradient",
  around: "loss, gradient and Hessian around a centre",
  evidence: "evidence for groups",
  ratio: "evidence for groups",
  left_out: "loss on rows left out",
  halves: "best groups for halves of the rows",
  certify: "certificate",
  judge: "scores of the models",
  score: "scores of the models",
};

// About -------------------------------------------------------------------------------------------------------------

export function setUpAbout() {
  const body = byId("about").querySelector(".body"),
    own = sharing.startsWith("personal");
  const facts = element("dl", { class: "settings" });
  const add = (name, value) =>
    facts.append(element("div", {}, element("dt", { text: name }), element("dd", { text: value })));
  for (const [name, value] of Object.entries(doc.settings || {})) {
    add(name, typeof value === "string" ? value : known(value) ? number(value, 6) : JSON.stringify(value));
  }
  if (doc.task) add("task", doc.task);
  if (doc.version) add("coterie", doc.version);
  if (doc.settings_sentence)
    body.append(element("h3", { text: "Settings" }), element("p", { id: "settings", text: doc.settings_sentence }));
  if (facts.children.length)
    body.append(element("details", {}, element("summary", { text: "All settings, by name" }), facts));
  if (doc.command)
    body.append(element("h3", { text: "Command" }), element("pre", { tabindex: "0", text: doc.command }));
  if (doc.notes && doc.notes.length)
    body.append(
      element("h3", { text: "Notes" }),
      element("ul", {}, ...doc.notes.map((text) => element("li", { text }))),
    );
  body.append(
    element("h3", { text: "How to read this page" }),
    element(
      "ul",
      {},
      ...[
        "lam is the strength of the penalty on differences between models. " +
          `At 0 every ${noun} has a separate model; from some lam on, all ${nouns} share one model.`,
        ...(doc.groups && doc.groups.kind
          ? [
              "Models are shown as they predict: " +
                (own
                  ? `each user's own, around the centre of its ${word}, without the penalty between users.`
                  : `each ${word} is fitted again to its rows, without the penalty.`),
            ]
          : []),
        "Move the slider, press its arrows, or press a point of a chart: the complete page then shows that lam. " +
          "The ring marks the chosen lam.",
        `${nouns[0].toUpperCase()}${nouns.slice(1)} of one ${word} have exactly the same ` +
          `${own ? "centre" : "model"}, not a similar one. ` +
          `The number of a ${word} holds for one lam only; colours and shapes follow a ${word} from lam to lam.`,
        `Press a node of the tree, a dot or line of the map, or a number in the table to select ${nouns}; ` +
          "press it again to clear.",
        ...(doc.scores
          ? [
              "Scores are on held-out rows: of the models at this lam, of models from each user's own rows only, and " +
                "of one model for all users.",
            ]
          : []),
        "Every chart can be saved as a table (CSV) or a picture (PNG). " +
          "The page needs no network and sends nothing.",
      ].map((text) => element("li", { text })),
    ),
  );
}
