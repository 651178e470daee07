// The number of clusters over lam, and the merge tree on the same axis.

import {
  bottomAxis, byId, drawing, element, explain, figure, known, leftAxis, linear, logarithmic, logTicks, mean, measure,
  number, plural, redrawAll, roving, shape, ticks, trimmed, integer,
} from "./basics.js";
import {
  chosen, counted, dimmed, doc, hue, labelOf, labels, lamAxis, lams, move, noun, nouns, points, select, separate, slotOf,
  state, users, views, word,
} from "./model.js";

/** Left and right ends of the axes of lam and of rounds. */
export const sides = (width) => [width < 480 ? 44 : 64, width - (width < 480 ? 12 : 18)];
const LARGE_TREE = 200,
  KEPT_MERGES = 60;

export function nowLines(axis, top, bottom, labelled) {
  const group = shape("g", {});
  if (!lams.length) return group;
  if (state.at !== chosen) {
    const x = axis.scale(lams[chosen]);
    group.append(shape("line", { x1: x, x2: x, y1: top, y2: bottom, class: "chosen-line" }));
    if (labelled && Math.abs(x - axis.scale(lams[state.at])) > 44) {
      const end = x > axis.scale(lams[lams.length - 1]) - 30;
      group.append(
        shape("text", {
          x: end ? x + 4 : x,
          y: top - 5,
          "text-anchor": end ? "end" : "middle",
          class: "soft",
          text: "chosen",
        }),
      );
    }
  }
  const x = axis.scale(lams[state.at]);
  group.append(shape("line", { x1: x, x2: x, y1: top, y2: bottom, class: "now-line" }));
  return group;
}

function drawSteps(width) {
  const height = 190,
    top = 26,
    bottom = height - 40;
  const [left, right] = sides(width);
  const axis = lamAxis(left, right);
  const counts = points.map((point) => Math.max(1, point.n_clusters || 1));
  const most = Math.max(2, ...counts);
  const scale = most >= 10 ? logarithmic(1, most * 1.08, bottom - 6, top) : linear(0, most * 1.08, bottom, top);
  const values =
    most >= 10 ? logTicks(1, most, 3).filter((x) => Number.isInteger(x)) : ticks(1, most, 4).filter(Number.isInteger);
  const chart = drawing(width, height, `Number of ${word}s at each lam`, true);
  const bounds = doc.bounds || {};
  const low = known(bounds.lower) ? bounds.lower : null,
    high = known(bounds.upper) ? bounds.upper : null;
  if (low !== null && high !== null && low < high && high > axis.low && low < axis.high) {
    const [x, end] = [axis.scale(low), axis.scale(high)];
    chart.append(shape("rect", { x, width: Math.max(2, end - x), y: top, height: bottom - top, class: "band" }));
  } else {
    for (const [x, name] of [
      [low, "lower"],
      [high, "upper"],
    ]) {
      if (x === null || x < axis.low || x > axis.high) continue;
      chart.append(
        shape(
          "line",
          { x1: axis.scale(x), x2: axis.scale(x), y1: top, y2: bottom, class: "bound-line" },
          shape("title", { text: `${name} bound ${number(x)}` }),
        ),
      );
    }
  }
  chart.append(
    leftAxis(scale, spacedDown(values, scale), left, right, `${word}s`, integer),
    bottomAxis(axis.scale, axis.ticks, bottom, left, right, "pull (lam)"),
    nowLines(axis, top, bottom, true),
  );
  let line = "";
  counts.forEach((n, k) => {
    line += k ? `H${axis.scale(lams[k])}V${scale(n)}` : `M${axis.scale(lams[0])},${scale(n)}`;
  });
  chart.append(shape("path", { d: line, class: "step" }));
  const dots = counts.map((n, k) =>
    explain(
      shape(
        "g",
        {
          class: "press",
          role: "button",
          "data-key": `lam-${k}`,
          "data-lam": k,
          "aria-label": `lam ${number(lams[k])}: ${counted(n)}`,
          "aria-pressed": k === state.at,
        },
        shape("circle", { cx: axis.scale(lams[k]), cy: scale(n), r: 11, class: "hit" }),
        shape("circle", {
          cx: axis.scale(lams[k]),
          cy: scale(n),
          r: k === state.at ? 6 : 3,
          class: k === state.at ? "dot now" : "dot",
        }),
        k === chosen ? shape("circle", { cx: axis.scale(lams[k]), cy: scale(n), r: 9, class: "ring" }) : null,
      ),
      () => [`lam ${number(lams[k])}${k === chosen ? ", chosen" : ""}`, counted(n)],
    ),
  );
  roving(dots, move, state.at);
  chart.append(...dots);
  const x = axis.scale(lams[state.at]),
    count = counts[state.at];
  if (count !== undefined) {
    chart.append(
      shape("text", {
        x: x > right - 60 ? right + 8 : Math.max(x, left + 30),
        y: 12,
        "text-anchor": x > right - 60 ? "end" : "middle",
        class: "strong",
        text: counted(count),
      }),
    );
  }
  return chart;
}

export function spacedDown(values, scale) {
  let last = Infinity;
  return values.filter((y) => {
    if (scale(y) > last - 16) return false;
    last = scale(y);
    return true;
  });
}

// The tree ----------------------------------------------------------------------------------------------------------

const tree =
  doc.tree && doc.tree.length === users.length - 1 && users.length > 1 ? layTree(doc.tree, users.length) : null;

/** Nodes in drawing order: leaves have a row, others the middle of their children's. Only the last merges of many.
 * Merges at one lam are one node with many children. */
function layTree(rows, n) {
  const cut = n > LARGE_TREE ? rows.length - KEPT_MERGES : 0;
  const inner = (id) => id >= n && id - n >= cut;
  const lamOf = (id) => (id < n ? null : rows[id - n][2]);
  const size = (id) => (id < n ? 1 : rows[id - n][3]);
  const childrenOf = (id) => {
    const children = [];
    const waiting = rows[id - n].slice(0, 2);
    while (waiting.length) {
      const k = waiting.pop();
      if (inner(k) && lamOf(k) === lamOf(id)) waiting.push(...rows[k - n].slice(0, 2));
      else children.push(k);
    }
    return children.sort((a, b) => size(b) - size(a) || a - b);
  };
  const nodes = new Map();
  let row = 0;
  const waiting = [{ id: n + rows.length - 1, parent: null, children: null }];
  while (waiting.length) {
    const node = waiting.pop();
    if (inner(node.id) && node.children === null) {
      node.children = childrenOf(node.id);
      waiting.push(node, ...[...node.children].reverse().map((id) => ({ id, parent: node.id, children: null })));
      continue;
    }
    node.inner = inner(node.id);
    node.children = node.children || [];
    node.lam = lamOf(node.id);
    node.size = size(node.id);
    const rowsBelow = node.children.map((id) => nodes.get(id).y);
    node.span = node.inner ? [Math.min(...rowsBelow), Math.max(...rowsBelow)] : [row, row];
    node.y = mean(node.span);
    if (!node.inner) row += 1;
    nodes.set(node.id, node);
  }
  return { rows, n, nodes, order: [...nodes.values()], leaves: row, collapsed: cut > 0 };
}

function below(id) {
  const members = [],
    waiting = [id];
  while (waiting.length) {
    const k = waiting.pop();
    if (k < tree.n) members.push(k);
    else waiting.push(tree.rows[k - tree.n][0], tree.rows[k - tree.n][1]);
  }
  return members.sort((a, b) => a - b);
}

/** For every node the cluster its users share now, or null, and whether all of them are selected. */
function together() {
  const shared = [],
    picked = [];
  for (let k = 0; k < tree.n; k += 1) {
    shared.push(labelOf(k));
    picked.push(state.selected !== null && state.selected.has(k));
  }
  for (const [a, b] of tree.rows) {
    shared.push(shared[a] !== null && shared[a] === shared[b] ? shared[a] : null);
    picked.push(picked[a] && picked[b]);
  }
  return { shared, picked };
}

/** Where lines begin: right of the names, of which those that are very long lose their middle. */
function leafRoom(width, named) {
  const longest = named ? users.reduce((most, name) => Math.max(most, Array.from(name).length), 0) : 0;
  return Math.min(Math.max(sides(width)[0], 12 + 6.7 * longest), 0.26 * width);
}

function drawTree(width) {
  const rowHeight = tree.leaves <= 62 ? 15 : Math.max(3, 620 / tree.leaves),
    named = !tree.collapsed && rowHeight >= 13;
  const top = 20,
    bottom = top + Math.max(60, tree.leaves * rowHeight),
    height = bottom + 38;
  const right = sides(width)[1],
    left = leafRoom(width, named);
  const axis = lamAxis(left, right);
  const placeY = (row) => top + (row + 0.5) * ((bottom - top) / tree.leaves);
  const last = lams[lams.length - 1];
  const x = (node) => (node.lam === null ? left : axis.scale(node.lam));
  const now = axis.scale(lams[state.at]);
  const { shared, picked } = together();
  const chart = drawing(width, height, "Merge tree: who joins whom at which lam", true);
  if (tree.order.some((node) => node.inner && node.lam > last)) {
    chart.append(
      shape(
        "rect",
        { x: axis.scale(last), width: right - axis.scale(last), y: top, height: bottom - top, class: "beyond" },
        shape("title", { text: "not reached on this path" }),
      ),
    );
  }
  chart.append(bottomAxis(axis.scale, axis.ticks, bottom, left, right, "pull (lam)"), nowLines(axis, top, bottom, false));
  chart.append(
    shape("text", {
      x: Math.min(now + 5, right),
      y: 11,
      "text-anchor": now > right - 130 ? "end" : "start",
      class: "cut",
      text: state.at === chosen ? `chosen cut: ${counted((points[chosen] || {}).n_clusters)}` : "cut",
    }),
  );
  const lines = new Map();
  const draw = (key, text) => lines.set(key, (lines.get(key) || "") + text);
  for (const node of tree.order) {
    const y = placeY(node.y).toFixed(1);
    const slot = shared[node.id] === null ? undefined : slotOf(shared[node.id]);
    const key = slot === undefined ? "plain" : hue(slot);
    if (node.parent !== null) {
      const end = x(tree.nodes.get(node.parent)),
        start = x(node);
      const middle = Math.min(Math.max(now, start), end);
      if (middle > start) draw(key, `M${start.toFixed(1)},${y}H${middle.toFixed(1)}`);
      if (end > middle) draw("plain", `M${middle.toFixed(1)},${y}H${end.toFixed(1)}`);
      if (picked[node.id]) draw("picked", `M${start.toFixed(1)},${y}H${end.toFixed(1)}`);
    }
    if (node.inner) {
      const ys = node.span.map((row) => placeY(row).toFixed(1));
      const joint = `M${x(node).toFixed(1)},${ys[0]}V${ys[1]}`;
      draw(node.lam <= lams[state.at] * (1 + 1e-9) ? key : "plain", joint);
      if (picked[node.id]) draw("picked", joint);
    }
  }
  for (const key of ["picked", "plain", "h0", "h1", "h2", "h3", "h4", "h5"]) {
    if (lines.has(key)) chart.append(shape("path", { d: lines.get(key), class: `branch ${key}` }));
  }
  if (named) {
    for (const node of tree.order.filter((k) => k.id < tree.n)) {
      const name = users[node.id];
      chart.append(
        shape("text", {
          x: left - 6,
          y: placeY(node.y) + 4,
          "text-anchor": "end",
          class: dimmed(node.id) ? "leaf dim" : "leaf",
          text: trimmed(name, Math.floor((left - 6) / 6.6)),
        }),
      );
    }
  }
  const tops = tree.order.filter((node) => node.id >= tree.n);
  const marks = tops.map((node) => {
    const when = node.lam > last ? "not joined on this path" : `together from lam ${number(node.lam)}`;
    const centre = { cx: x(node), cy: placeY(node.y) };
    return explain(
      shape(
        "g",
        {
          class: `press node ${picked[node.id] ? "picked" : ""}`,
          role: "button",
          "data-key": `node-${node.id}`,
          "data-size": node.size,
          "aria-label": `${plural(node.size, noun)}, ${when}`,
          "aria-pressed": picked[node.id],
        },
        shape("circle", { ...centre, r: 8, class: "hit" }),
        shape("circle", { ...centre, r: node.inner ? Math.min(6, 2.6 + Math.sqrt(node.size) / 4) : 2.6, class: "dot" }),
        node.inner
          ? null
          : shape("text", {
              x: centre.cx - 7,
              y: centre.cy + 4,
              "text-anchor": "end",
              class: "leaf",
              text: integer(node.size),
            }),
      ),
      () => [plural(node.size, noun), when, "press to select them"],
    );
  });
  roving(marks, (k) => {
    const same = state.because === `node ${tops[k].id}`;
    select(same ? null : below(tops[k].id), `node ${tops[k].id}`);
  });
  chart.append(...marks);
  return chart;
}

function stepsNote() {
  const { lower, upper } = doc.bounds || {};
  const marks = "The ring marks the chosen lam.";
  if (!known(lower) || !known(upper)) return marks;
  if (lower < upper)
    return `${marks} Shaded: lam from ${number(lower)} to ${number(upper)}, where theorems prove the chosen ${word}s.`;
  return `${marks} Dotted: the recovery bounds ${number(lower)} and ${number(upper)}, between which no lam lies.`;
}

export function setUpPath() {
  const section = byId("path");
  if (lams.length < 2) {
    section.hidden = true;
    return;
  }
  const body = section.querySelector(".body");
  if (tree && labels) {
    // A tree whose users end as one group, or none, says little: it is drawn where it is asked for.
    const count = (points[chosen] || {}).n_clusters;
    const hidden = doc.groups && doc.groups.kind && (count === 1 || separate(count));
    const details = element("details", { id: "more-tree" }, element("summary", { text: "Show the merge tree" }));
    details.addEventListener("toggle", () => {
      measure();
      redrawAll();
    });
    if (hidden) body.append(details);
    figure(hidden ? details : body, {
      name: "tree",
      title: tree.collapsed ? `Merge tree, its last ${KEPT_MERGES} merges` : "Merge tree",
      draw: drawTree,
      note:
        (tree.collapsed
          ? `Numbers: ${nouns} that already share a model at the left end.`
          : `Each line is a ${noun}, read from left to right; lines join where models become equal.`) +
        ` Press a node to select its ${nouns}.`,
      rows: () => [
        ["node", "first", "second", "lam", nouns],
        ...tree.rows.map((row, k) => [tree.n + k, ...row.slice(0, 4)]),
      ],
    });
  }
  if (points.length) {
    figure(body, {
      name: "path",
      title: `Number of ${word}s, the harder the pull`,
      draw: drawSteps,
      note: stepsNote(),
      rows: () => [
        ["lam", "groups", "objective", "bound", "gap", "status", "chosen"],
        ...points.map((p, k) => [
          lams[k],
          p.n_clusters,
          p.objective,
          p.bound,
          p.gap,
          p.status,
          k === chosen ? "yes" : "",
        ]),
      ],
    });
  }
  views.push(() => {
    const count = (points[state.at] || {}).n_clusters;
    byId("path-lead").textContent =
      (doc.groups && doc.groups.proposed
        ? `The harder ${nouns} are pulled together, the more of them share a model. Who is pulled to whom knows nothing of ` +
          `${word}s: this tree proposed them, and they were then improved and compared. The line is the chosen cut. `
        : `The harder ${nouns} are pulled together, the more of them share a model. `) +
      `At lam = ${number(lams[state.at])} ` +
      (separate(count)
        ? `every ${noun} has a model of its own.`
        : `there ${count === 1 ? "is" : "are"} ${counted(count)}.`);
  });
}
