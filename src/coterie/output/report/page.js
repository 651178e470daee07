// The header, the control and the start.

import { byId, element, help, known, measure, number, plural, redrawAll, integer } from "./basics.js";
import {
  chosen, counted, doc, everyone, glyph, lams, move, noun, nouns, points, select, separate, sharing, show, slotOf, state,
  views, word,
} from "./model.js";
import { setUpPath } from "./path.js";
import { setUpMap } from "./map.js";
import { setUpScores, setUpTable } from "./people.js";
import { setUpCoefficients, setUpShares } from "./coefficients.js";
import { setUpCurves } from "./curves.js";
import { setUpChecks, setUpEvidence, setUpStability } from "./evidence.js";
import { setUpAbout, setUpCertificate, setUpFederated, setUpPrivacy } from "./proof.js";

/** What the words of the first screen mean: each question mark opens one sentence. */
const MEANING = {
  answer: `The ${nouns} of a ${word} share exactly the same model, or the same centre of their models.`,
  who:
    "Typical: what is predicted where all columns have their mean. Others: the mean of the other groups. " +
    "A coefficient says what one more unit changes while all else stays.",
  better:
    `Some rows of every ${noun} were kept out of the fit, and errors are compared on them. A gain of less than two ` +
    "standard errors can be chance.",
  sure: doc.groups && doc.groups.stability
    ? `Other rows of the same ${nouns} are drawn at random, to see who would be in another ${word}.`
    : "Kinds of models are compared by the error that is expected on rows that they have not seen.",
  average: "Each part was learned without the rows that judge it; the weights are those that predict such rows best.",
  badge:
    "A proof that does not depend on the solver: no other models solve the stated problem better by more than the gap. " +
    `It does not prove that the ${word}s are right.`,
};

function setUpWho(said) {
  const list = byId("who");
  for (const each of said.groups || []) {
    const k = each.number - 1;
    list.append(
      element(
        "li",
        {},
        glyph(slotOf(k, chosen), 16),
        element("b", { text: `Group ${each.number}, ${plural(each.users, noun)}` }),
        element("span", { class: "names", text: each.names }),
        element("span", { class: "differs", text: each.differs }),
      ),
    );
  }
  const rest = (points[chosen] || {}).n_clusters - (said.groups || []).length;
  if (list.children.length) {
    if (rest > 0) list.append(element("li", { class: "rest", text: `and ${plural(rest, word)} more` }));
    list.append(element("li", { class: "rest" }, "What the numbers mean", ...help(MEANING.who)));
  } else list.hidden = true;
}

function setUpHeader() {
  const point = points[chosen] || {},
    said = doc.headline || {};
  const unstable = doc.groups && doc.groups.stability && !doc.groups.stability.stable ? "Unstable groups: " : "";
  const what = counted(point.n_clusters);
  const counts =
    lams.length && known(point.n_clusters)
      ? `${what[0].toUpperCase()}${what.slice(1)} among ${plural(everyone, noun)}.`
      : plural(everyone, noun) + ".";
  byId("answer").textContent = unstable + (said.found || counts);
  setUpWho(said);
  for (const id of ["shared", "better", "sure", "average"]) {
    const text = said[id] || "";
    byId(id).querySelector("dd").append(text, ...(text && MEANING[id] ? help(MEANING[id]) : []));
    byId(id).hidden = !text;
  }
  for (const [id, name, text] of [
    ["private", "Private", said.private],
    ["missing", "Not everybody", said.aside],
  ]) {
    byId(id).append(element("strong", { text: `${name}: ` }), text || "");
    byId(id).hidden = !text;
  }
  byId("warnings").append(
    ...(doc.warnings || []).map((text) => element("p", {}, element("strong", { text: "Warning: " }), text)),
  );
  byId("warnings").hidden = !(doc.warnings || []).length;
  const sure = known(point.gap);
  const of = doc.privacy ? " for the released statistics" : "";
  byId("badge").textContent = sure ? `Computation certified${of}` : "Computation not certified";
  byId("badge").after(...help(MEANING.badge));
  byId("badge").classList.toggle("open", !sure);
  byId("badge").parentElement.hidden = byId("certificate").hidden;
  byId("subtitle").textContent = doc.subtitle || "";
  byId("reduced").textContent = doc.reduced
    ? `This page shows ${integer(doc.reduced.shown)} of ${integer(doc.reduced.users)} users; ` +
      `the number of ${word}s, the objective and the gap are those of all users, sizes count the users shown.`
    : "";
  for (const id of ["subtitle", "reduced"]) byId(id).hidden = !byId(id).textContent;
  const names = {
    curves: "Curves",
    coefficients: "Models",
    evidence: "Evidence",
    stability: "Stability",
    checks: doc.checks && doc.checks.reliability ? "Probabilities" : "Intervals",
    personal: "Personal",
    path: "Path",
    map: "Map",
    scores: "Scores",
    users: nouns[0].toUpperCase() + nouns.slice(1),
    certificate: "Certificate",
    privacy: "Privacy",
    federated: "Federation",
    about: "About",
  };
  for (const [id, name] of Object.entries(names)) {
    if (!byId(id).hidden) byId("contents").append(element("a", { href: `#${id}`, text: name }));
  }
}

function setUpTheme() {
  const button = byId("theme");
  const key = `coterie theme ${location.pathname}`;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let kept = null;
  try {
    kept = localStorage.getItem(key);
  } catch {
    // Not allowed: use the theme of the system.
  }
  const dark = () => document.documentElement.dataset.theme === "dark";
  const use = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", dark() ? "Light: use the light theme" : "Dark: use the dark theme");
  };
  const follow = () => use(kept === "dark" || kept === "light" ? kept : system.matches ? "dark" : "light");
  button.addEventListener("click", () => {
    kept = dark() ? "light" : "dark";
    use(kept);
    try {
      localStorage.setItem(key, kept);
    } catch {
      // It holds until the page is closed.
    }
  });
  system.addEventListener("change", follow);
  follow();
}

function setUpControl() {
  const slider = byId("slider"),
    last = lams.length - 1;
  if (!lams.length) {
    byId("control").hidden = true;
    return;
  }
  slider.max = Math.max(last, 0);
  slider.disabled = last < 1;
  byId("control").querySelector(".knob").hidden = last < 1;
  byId("back").hidden = last < 1;
  byId("pin").style.left = `calc(9px + (100% - 18px) * ${last > 0 ? chosen / last : 0})`;
  slider.addEventListener("input", () => move(Number(slider.value)));
  byId("previous").addEventListener("click", () => move(state.at - 1));
  byId("next").addEventListener("click", () => move(state.at + 1));
  byId("back").addEventListener("click", () => move(chosen));
  byId("chip-clear").addEventListener("click", () => {
    select(null);
    slider.focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.selected) select(null);
  });
  views.push(() => {
    const point = points[state.at] || {};
    slider.value = state.at;
    slider.setAttribute("aria-valuetext", `lam ${number(lams[state.at])}, ${counted(point.n_clusters)}`);
    byId("now-lam").textContent = number(lams[state.at]);
    byId("now-clusters").textContent = integer(point.n_clusters);
    byId("now-clusters-name").textContent = separate(point.n_clusters)
      ? "separate models"
      : (sharing === "personal" ? "centre" : word) + (point.n_clusters === 1 ? "" : "s");
    byId("now-gap").textContent = number(point.gap, 2);
    byId("previous").disabled = state.at === 0;
    byId("next").disabled = state.at === last;
    byId("back").disabled = state.at === chosen;
    byId("chip").hidden = state.selected === null;
    byId("chip-text").textContent = state.selected ? `Selection: ${plural(state.selected.size, noun)}` : "";
  });
}

for (const setUp of [
  setUpTheme,
  setUpControl,
  setUpCurves,
  setUpEvidence,
  setUpStability,
  setUpChecks,
  setUpShares,
  setUpPath,
  setUpMap,
  setUpTable,
  setUpScores,
  setUpCoefficients,
  setUpCertificate,
  setUpPrivacy,
  setUpFederated,
  setUpAbout,
  setUpHeader,
])
  setUp();
for (const pair of document.querySelectorAll(".pair")) {
  const shown = [...pair.children].filter((child) => !child.hidden);
  pair.classList.toggle("single", shown.length === 1);
  pair.hidden = !shown.length;
}
views.push(redrawAll);
const PAPER = 680; // of a page of A4 between its margins, in CSS pixels; charts that are wider would be made smaller
addEventListener("beforeprint", () => {
  measure(PAPER);
  redrawAll();
});
addEventListener("afterprint", () => {
  measure();
  redrawAll();
});
let wide = byId("main").clientWidth;
measure();
show();

new ResizeObserver(() => {
  if (byId("main").clientWidth === wide) return;
  wide = byId("main").clientWidth;
  requestAnimationFrame(() => {
    measure();
    redrawAll();
  });
}).observe(byId("main"));
