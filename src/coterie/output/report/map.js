// Where the models lie: dots of a projection, or separating lines over the samples. Moves with lam.

import {
  bottomAxis, byId, drawing, element, explain, figure, leftAxis, linear, mean, roving, shape, single, ticks, unpack,
} from "./basics.js";
import {
  clusters, describe, dimmed, doc, hue, labelOf, labels, lams, naming, noun, nouns, outline, select, sharing, slotOf, state,
  users, word,
} from "./model.js";

const plan =
  doc.map && doc.map.points ? { ...doc.map, points: unpack(doc.map.points), samples: unpack(doc.map.samples) } : null;
const lines = plan !== null && plan.kind === "separators";
const stride = plan ? plan.points.shape[2] : 0;
const model = (user, at, axis) => (axis < stride ? plan.points.values[(at * users.length + user) * stride + axis] : 0);
/** Whether users of a group have models of their own, so that each is drawn. */
const own = sharing.startsWith("personal");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
/** What was drawn last, from which the next moves, and whether the axes are the same at every lam. */
const mapView = { before: null, scale: null, frame: 0, fixed: false };

function extent(values, step, offset) {
  let low = Infinity,
    high = -Infinity;
  for (let k = offset; k < values.length; k += step) {
    if (Number.isFinite(values[k])) {
      low = Math.min(low, values[k]);
      high = Math.max(high, values[k]);
    }
  }
  return low <= high ? [low, high] : [0, 1];
}

/** Scales of both axes, of one unit of length where that leaves both readable. */
function frame(width, height, margin) {
  const each = users.length * stride;
  const current = plan.points.values.subarray(state.at * each, (state.at + 1) * each);
  const spans = [0, 1].map((axis) => {
    if ((lines && !plan.samples) || axis >= stride) return [-1, 1];
    const all = lines ? extent(plan.samples.values, 4, axis) : extent(plan.points.values, stride, axis);
    const [low, high] = lines || mapView.fixed ? all : extent(current, stride, axis);
    const least = 0.04 * (all[1] - all[0]) || 0.1 * Math.abs(all[1]) || 1; // where all models are equal
    const pad = Math.max((high - low) * (lines ? 0.04 : 0.16), (least - (high - low)) / 2);
    return [low - pad, high + pad];
  });
  const room = [width - margin.left - margin.right, height - margin.top - margin.bottom];
  const unit = spans.map(([low, high], axis) => (high - low) / room[axis]);
  const ratio = unit[0] / unit[1];
  if (lines || (ratio < 6 && ratio > 1 / 6)) {
    const shared = Math.max(...unit);
    spans.forEach((span, axis) => {
      const extra = (shared * room[axis] - (span[1] - span[0])) / 2;
      span[0] -= extra;
      span[1] += extra;
    });
  }
  return {
    spans,
    x: linear(...spans[0], margin.left, width - margin.right),
    y: linear(...spans[1], height - margin.bottom, margin.top),
  };
}

function radius(size) {
  // Wide enough for the number in it.
  return size === 1 ? 3.6 : Math.max(8.5, 3 + 4.1 * String(size).length, 5 + 21 * Math.sqrt(size / users.length));
}

const overlap = (a, b) => a[0] < b[2] && a[2] > b[0] && a[1] < b[3] && a[3] > b[1];

/** Dots on a line are set above each other where they would overlap. */
function swarm(marks) {
  const placed = [];
  for (const mark of [...marks].sort((a, b) => b.r - a.r)) {
    for (let k = 0; k < 400; k += 1) {
      const y = Math.ceil(k / 2) * 4 * (k % 2 ? 1 : -1);
      if (placed.some((other) => (other.x - mark.x) ** 2 + (other.lift - y) ** 2 < (other.r + mark.r) ** 2)) continue;
      mark.lift = y;
      break;
    }
    mark.lift = mark.lift || 0;
    placed.push(mark);
  }
}

function drawMap(width) {
  const [lowest, highest] = stride > 1 ? extent(plan.points.values, stride, 1) : [0, 0];
  const flat = plan.kind === "line" && lowest === highest;
  const tall = flat ? 0.45 : lines ? 0.9 : 0.72;
  const height = Math.round(Math.min(lines ? 560 : 470, Math.max(flat ? 220 : 300, width * tall)));
  const margin = { left: 52, right: 14, top: 22, bottom: 42 };
  const scale = frame(width, height, margin);
  const chart = drawing(width, height, lines ? "Separating lines over the samples" : "Models of all users", true);
  const [left, right, bottom] = [margin.left, width - margin.right, height - margin.bottom];
  if (!flat) chart.append(leftAxis(scale.y, ticks(...scale.spans[1], 5), left, right, plan.ylabel || ""));
  chart.append(
    bottomAxis(scale.x, ticks(...scale.spans[0], (right - left) / 70), bottom, left, right, plan.xlabel || ""),
  );
  const box = [left, margin.top, right, bottom];
  return lines ? drawLines(chart, scale, box) : drawDots(chart, scale, flat, box);
}

function drawDots(chart, scale, flat, [left, top, right, bottom]) {
  const at = state.at,
    from = mapView.before === null || calm.matches ? at : mapView.before;
  const old = from === at || !mapView.scale ? scale : mapView.scale;
  mapView.before = at;
  mapView.scale = scale;
  if (users.length <= 300 && !flat) {
    let ways = "";
    users.forEach((_, user) => {
      for (let k = 0; k <= at; k += 1) {
        const [x, y] = [scale.x(model(user, k, 0)), scale.y(model(user, k, 1))];
        if (Number.isFinite(x + y)) ways += `${k ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`;
      }
    });
    const window = shape("rect", { x: left, y: top, width: right - left, height: bottom - top });
    chart.append(
      shape("clipPath", { id: "window" }, window),
      shape("path", {
        d: ways,
        class: "ways",
        opacity: Math.max(0.08, Math.min(0.35, 14 / users.length)),
        "clip-path": "url(#window)",
      }),
    );
  }
  const marks = [...clusters()]
    .flatMap(([k, members]) => (own ? members.map((user) => [k, [user]]) : [[k, members]]))
    .map(([k, members]) => {
      const average = (when, axis) => mean(members.map((user) => model(user, when, axis)));
      return {
        k,
        members,
        slot: slotOf(k),
        r: own ? 4.6 : radius(members.length),
        x: scale.x(average(at, 0)),
        y: scale.y(average(at, 1)),
        x0: old.x(average(from, 0)),
        y0: old.y(average(from, 1)),
        lift: 0,
      };
    })
    .filter((mark) => Number.isFinite(mark.x + mark.y));
  if (flat) swarm(marks);
  marks.sort((a, b) => b.members.length - a.members.length);
  const named = [];
  const others = marks.map(({ k, x, y, lift, r }) => ({ k, box: [x - r, y + lift - r, x + r, y + lift + r] }));
  for (const mark of marks) {
    const { k, members, slot, r } = mark;
    const away = members.every(dimmed);
    mark.node = explain(
      shape(
        "g",
        {
          class: `press mark-group ${away ? "dim" : ""}`,
          role: "button",
          "data-key": own ? `user-${members[0]}` : `cluster-${k}`,
          "data-cluster": k,
          "data-size": members.length,
          "data-x": mark.x.toFixed(2),
          "data-y": mark.y.toFixed(2),
          "aria-label": describe(k, members).filter(Boolean).join(", "),
        },
        shape("path", { d: outline(slot, r), class: `mark ${hue(slot)}` }),
        members.length > 1
          ? shape("text", {
              y: slot !== undefined && outline(slot, 1) === outline(3, 1) ? 6.4 : 4.3,
              "text-anchor": "middle",
              class: `count on-${hue(slot)}`,
              text: members.length,
            })
          : null,
      ),
      () => (own ? [`${noun} ${users[members[0]]}`, naming(k)] : describe(k, members)),
    );
    if (members.length < 2 || named.length > 11) continue;
    // The name goes below the dot or above it, where there is room, or nowhere.
    const half = naming(k).length * 3.5;
    for (const y of [r + 13, -r - 7]) {
      const down = mark.y + mark.lift + y;
      const box = [mark.x - half, down - 10, mark.x + half, down + 3];
      const inside = box[0] > left && box[2] < right && box[1] > top && box[3] < bottom;
      if (!inside || others.some((other) => other.k !== k && overlap(box, other.box))) continue;
      mark.node.append(shape("text", { y, "text-anchor": "middle", class: "soft", text: naming(k) }));
      others.push({ k: null, box });
      named.push(k);
      break;
    }
  }
  roving(
    marks.map((mark) => mark.node),
    (k) => pick(marks[k].k, own ? clusters().get(marks[k].k) : marks[k].members),
  );
  chart.append(...marks.map((mark) => mark.node));
  const put = (share) => {
    for (const { node, x, y, x0, y0, lift } of marks)
      node.setAttribute(
        "transform",
        `translate(${(x0 + (x - x0) * share).toFixed(2)},${(y0 + (y - y0) * share + lift).toFixed(2)})`,
      );
  };
  cancelAnimationFrame(mapView.frame);
  if (from === at) {
    put(1);
    return chart;
  }
  put(0);
  let start = null;
  const step = (time) => {
    start = start === null ? time : start;
    const share = Math.min(1, (time - start) / 320);
    put(1 - (1 - share) ** 3);
    if (share < 1) mapView.frame = requestAnimationFrame(step);
  };
  mapView.frame = requestAnimationFrame(step);
  return chart;
}

/** The two ends of w1 x + w2 y + b = 0 inside a box of data coordinates, or null. */
function ends([w1, w2, b], [[x0, x1], [y0, y1]]) {
  const hits = [];
  const add = (x, y) => {
    if (x >= x0 - 1e-9 && x <= x1 + 1e-9 && y >= y0 - 1e-9 && y <= y1 + 1e-9) hits.push([x, y]);
  };
  if (w2 !== 0) {
    add(x0, -(w1 * x0 + b) / w2);
    add(x1, -(w1 * x1 + b) / w2);
  }
  if (w1 !== 0) {
    add(-(w2 * y0 + b) / w1, y0);
    add(-(w2 * y1 + b) / w1, y1);
  }
  let best = null,
    longest = 0;
  for (const p of hits)
    for (const q of hits) {
      const length = (p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2;
      if (length > longest) {
        longest = length;
        best = [p, q];
      }
    }
  return best;
}

function drawLines(chart, scale, [left, top, right, bottom]) {
  const groups = new Map();
  const samples = plan.samples ? plan.samples.values : [];
  for (let k = 0; k + 3 < samples.length; k += 4) {
    const user = samples[k + 3];
    const key = `${dimmed(user) ? "dim " : ""}${hue(slotOf(labelOf(user)))} ${samples[k + 2] > 0 ? "yes" : "no"}`;
    const [x, y] = [scale.x(samples[k]).toFixed(1), scale.y(samples[k + 1]).toFixed(1)];
    const text =
      samples[k + 2] > 0
        ? `M${x - 2.4},${y}a2.4,2.4 0 1,0 4.8,0a2.4,2.4 0 1,0 -4.8,0`
        : `M${x - 2.2},${y - 2.2}l4.4,4.4m0,-4.4l-4.4,4.4`;
    groups.set(key, (groups.get(key) || "") + text);
  }
  for (const [key, d] of groups) chart.append(shape("path", { d, class: `sample ${key}` }));
  const marks = [];
  const taken = [];
  for (const [k, members] of [...clusters()].sort((a, b) => a[1].length - b[1].length)) {
    const end = ends(
      [0, 1, 2].map((axis) => model(members[0], state.at, axis)),
      scale.spans,
    );
    if (!end) continue;
    const [x1, y1, x2, y2] = [scale.x(end[0][0]), scale.y(end[0][1]), scale.x(end[1][0]), scale.y(end[1][1])];
    const slot = slotOf(k),
      many = members.length > 1;
    const node = explain(
      shape(
        "g",
        {
          class: `press line-group ${members.every(dimmed) ? "dim" : ""}`,
          role: "button",
          "data-key": `cluster-${k}`,
          "data-cluster": k,
          "data-size": members.length,
          "aria-label": describe(k, members).filter(Boolean).join(", "),
        },
        shape("line", { x1, y1, x2, y2, class: "hit" }),
        shape("line", {
          x1,
          y1,
          x2,
          y2,
          class: `separator ${hue(slot)}`,
          "stroke-width": many ? 1.4 + 2.2 * Math.sqrt(members.length / users.length) : 0.8,
        }),
      ),
      () => describe(k, members),
    );
    marks.push({ k, members, node });
    if (!many) continue;
    // The badge sits on the line near one of its ends, where no other badge is.
    for (const share of [0.06, 0.94, 0.14, 0.86, 0.22, 0.78]) {
      const [x, y] = [
        Math.min(Math.max(x1 + share * (x2 - x1), left + 16), right - 16),
        Math.min(Math.max(y1 + share * (y2 - y1), top + 12), bottom - 14),
      ];
      if (taken.some((other) => Math.hypot(other[0] - x, other[1] - y) < 28)) continue;
      taken.push([x, y]);
      node.append(
        shape(
          "g",
          { transform: `translate(${x},${y})` },
          shape("path", { d: outline(slot, 10.5), class: `mark ${hue(slot)}` }),
          shape("text", {
            y: slot !== undefined && outline(slot, 1) === outline(3, 1) ? 6.4 : 4.3,
            "text-anchor": "middle",
            class: `count on-${hue(slot)}`,
            text: members.length,
          }),
        ),
      );
      break;
    }
  }
  const order = [...marks].reverse();
  roving(
    order.map((mark) => mark.node),
    (k) => pick(order[k].k, order[k].members),
  );
  chart.append(...marks.map((mark) => mark.node));
  return chart;
}

export function pick(k, members) {
  const because = `${naming(k)} at ${state.at}`;
  select(state.because === because ? null : members, because);
}

export function setUpMap() {
  const section = byId("map");
  if (!plan || !labels || !users.length) {
    section.hidden = true;
    return;
  }
  byId("map-lead").textContent = lines
    ? `One separating line for each model, over the samples in the colour of their user's ${word}. ` +
      "A number on a line: how many users share it."
    : own
      ? `One dot for each user's model, in the colour and shape of its ${word}.`
      : `One dot for each model. ${nouns[0].toUpperCase()}${nouns.slice(1)} that share a model are one larger dot with their number in it; ` +
        `hollow dots are ${nouns} with a model of their own.`;
  const body = section.querySelector(".body");
  const ways =
    users.length <= 300 && lams.length > 1 ? "Thin lines: paths of the models from the smallest lam to this one." : "";
  const holder = figure(body, {
    name: "map",
    title: lines ? "Separating lines" : "Models at this lam",
    draw: drawMap,
    note: [lines ? "Rings and crosses are the two classes." : ways, plan.note].filter(Boolean).join(" "),
    rows: () => [
      [noun, "group", ...(lines ? ["w1", "w2", "b"] : [plan.xlabel || "x", plan.ylabel || "y"])],
      ...users.map((name, user) => [
        name,
        labelOf(user) + 1,
        ...Array.from({ length: lines ? 3 : 2 }, (_, axis) => single(model(user, state.at, axis))),
      ]),
    ],
  });
  if (lines || lams.length < 2) return;
  const box = element("input", { type: "checkbox", id: "fixed-axes" });
  box.addEventListener("change", () => {
    mapView.fixed = box.checked;
    holder.redraw();
  });
  body.append(element("div", { class: "tools below" }, element("label", {}, box, " Same axes at every lam")));
}
