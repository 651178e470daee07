// The document, what is shown of it now, and the clusters at each lam with colours that follow them along the path.

import {
  byId, hideTip, known, logarithmic, logTicks, mean, number, plural, severally, shape, single, unpack, integer,
} from "./basics.js";

export const doc = JSON.parse(byId("document").textContent);
export const users = doc.users || [];
export const lams = doc.lams || [];
export const points = doc.points || [];
export const labels = unpack(doc.labels);
export const scores = doc.scores
  ? {
      ...doc.scores,
      alone: unpack(doc.scores.alone),
      together: unpack(doc.scores.together),
      points: unpack(doc.scores.points),
    }
  : null;
export const chosen = Math.min(Math.max(doc.chosen || 0, 0), Math.max(lams.length - 1, 0));
export const word = "group";
export const sharing = (doc.groups && doc.groups.kind) || "";
/** What a row of the table of users is: a user, or a point. */
export const noun = doc.noun || "user";
export const nouns = doc.nouns || severally(noun);
export const everyone = doc.reduced ? doc.reduced.users : users.length;
/** Whether users share nothing, and "3 groups" or what there is instead. */
export const separate = (count) => count === everyone && everyone > 1;
export const counted = (count) =>
  separate(count) ? "no groups" : sharing === "personal" && count === 1 ? "one shared centre" : plural(count, word);

/** What the page shows: the path's point, the selected users (null: all) and how they were selected. */
export const state = { at: chosen, selected: null, because: "" };
export const views = [];

export function show() {
  hideTip();
  for (const view of views) view();
}
export function move(at) {
  const to = Math.min(Math.max(at, 0), lams.length - 1);
  if (to === state.at) return;
  state.at = to;
  show();
}
export function select(members, because) {
  state.selected = members ? new Set(members) : null;
  state.because = because || "";
  show();
}
export const dimmed = (user) => state.selected !== null && !state.selected.has(user);

export const labelOf = (user, at = state.at) => labels.values[at * users.length + user];
export function scoreOf(kind, user, at = state.at) {
  if (!scores || !scores[kind]) return null;
  const value = scores[kind].values[kind === "points" ? at * users.length + user : user];
  return Number.isNaN(value) ? null : single(value);
}

const memo = new Map();
/** Clusters at a point of the path as Map(number -> users), in order of number. */
export function clusters(at = state.at) {
  if (!labels) return new Map();
  if (!memo.has(at)) {
    const groups = new Map();
    users.forEach((_, user) => {
      const k = labelOf(user, at);
      if (!groups.has(k)) groups.set(k, []);
      groups.get(k).push(user);
    });
    memo.set(at, new Map([...groups].sort((a, b) => a[0] - b[0])));
  }
  return memo.get(at);
}
export const sizeOf = (user, at = state.at) => clusters(at).get(labelOf(user, at)).length;

// A slot is a colour and a shape. Users alone have none; others keep theirs from lam to lam while most of them stay.
const HUES = 6,
  SHAPES = 4;
const slots = lams.map(() => new Map());

function follow(at, from) {
  const shared = new Map();
  for (const [k, members] of clusters(at)) {
    if (members.length < 2) continue;
    for (const user of members) {
      const slot = from === null ? undefined : slots[from].get(labelOf(user, from));
      if (slot === undefined) continue;
      const key = `${k} ${slot}`;
      shared.set(key, (shared.get(key) || 0) + 1);
    }
  }
  const taken = new Set();
  for (const [key] of [...shared].sort((a, b) => b[1] - a[1])) {
    const [k, slot] = key.split(" ").map(Number);
    if (slots[at].has(k) || taken.has(slot)) continue;
    slots[at].set(k, slot);
    taken.add(slot);
  }
  let free = 0;
  const rest = [...clusters(at)].filter(([k, members]) => members.length > 1 && !slots[at].has(k));
  for (const [k] of rest.sort((a, b) => b[1].length - a[1].length)) {
    while (taken.has(free)) free += 1;
    slots[at].set(k, free);
    taken.add(free);
  }
}
if (labels && lams.length) {
  follow(chosen, null);
  for (let at = chosen + 1; at < lams.length; at += 1) follow(at, at - 1);
  for (let at = chosen - 1; at >= 0; at -= 1) follow(at, at + 1);
}
export const slotOf = (k, at = state.at) => slots[at].get(k);
export const hue = (slot) => (slot === undefined ? "alone" : `h${slot % HUES}`);

/** The outline of a slot's shape of about the area of a circle of radius r, around the origin. */
export function outline(slot, r) {
  const kind = slot === undefined ? 0 : ((slot % HUES) + Math.floor(slot / HUES)) % SHAPES;
  const f = (x) => (x * r).toFixed(2);
  if (kind === 1) return `M${f(-0.89)},${f(-0.89)}h${f(1.78)}v${f(1.78)}h${f(-1.78)}z`;
  if (kind === 2) return `M0,${f(-1.27)}L${f(1.27)},0L0,${f(1.27)}L${f(-1.27)},0z`;
  if (kind === 3) return `M0,${f(-1.45)}L${f(1.38)},${f(0.92)}L${f(-1.38)},${f(0.92)}z`;
  return `M${f(-1)},0a${f(1)},${f(1)} 0 1,0 ${f(2)},0a${f(1)},${f(1)} 0 1,0 ${f(-2)},0z`;
}
export function glyph(slot, size = 12) {
  return shape(
    "svg",
    { width: size, height: size, viewBox: "-8 -8 16 16", class: "glyph", "aria-hidden": "true" },
    shape("path", { d: outline(slot, slot === undefined ? 4 : 5.4), class: `mark ${hue(slot)}` }),
  );
}
/** Groups are numbered from 1, in the order of the labels, which begin at 0. */
export const naming = (k) => `${word} ${k + 1}`;

/** Lines of the tooltip of some users that share a model. */
export function describe(k, members) {
  const names = members
    .slice(0, 6)
    .map((user) => users[user])
    .join(", ");
  const values = members.map((user) => scoreOf("points", user)).filter(known);
  const score = values.length ? `${scores.metric} ${number(mean(values))}${values.length > 1 ? " on average" : ""}` : "";
  if (members.length === 1) return [`${noun} ${users[members[0]]}`, `alone (${naming(k)})`, score];
  const more = members.length > 6 ? ` and ${integer(members.length - 6)} more` : "";
  return [`${naming(k)}: ${plural(members.length, noun)}`, names + more, score];
}

/** Where lam lies between left and right on a logarithmic axis; 0, where it occurs, is set apart on the left. */
export function lamAxis(left, right) {
  const tree = (doc.tree || []).map((row) => row[2]);
  const all = [...lams, ...tree].filter(known);
  let low = Infinity,
    high = 0;
  for (const x of all)
    if (x > 0) {
      low = Math.min(low, x);
      high = Math.max(high, x);
    }
  if (!(high > 0)) {
    low = 0.1;
    high = 1;
  }
  if (low === high) {
    low /= 2;
    high *= 2;
  }
  const zero = all.some((x) => x <= 0);
  const start = left + (zero ? Math.min(34, (right - left) / 8) : 0);
  const inner = logarithmic(low, high, start, right);
  const scale = (x) => (x > 0 ? Math.min(Math.max(inner(x), start), right) : left);
  const values = logTicks(low, high, (right - start) / 75);
  return { scale, low, high, ticks: zero ? [0, ...values] : values };
}
