// The header, the control and the start.

import { byId, element, known, measure, number, plural, redrawAll, integer } from "./basics.js";
import { chosen, doc, lams, move, points, select, show, state, users, views, word } from "./model.js";
import { setUpPath } from "./path.js";
import { setUpMap } from "./map.js";
import { setUpCoefficients, setUpScores, setUpTable } from "./people.js";
import { setUpEvidence } from "./evidence.js";
import { setUpAbout, setUpCertificate, setUpFederated, setUpPrivacy } from "./proof.js";

function setUpHeader() {
  const n = doc.reduced ? doc.reduced.users : users.length,
    point = points[chosen] || {};
  const sure = known(point.gap) ? `, certified to within ${number(point.gap, 2)} of the optimum` : "";
  const personal = ((doc.groups && doc.groups.kind) || "").startsWith("personal");
  const what = personal && point.n_clusters === 1 ? "Personal models around one centre" : plural(point.n_clusters, word);
  const unstable = doc.groups && doc.groups.stability && !doc.groups.stability.stable ? "Unstable groups: " : "";
  byId("answer").textContent =
    lams.length && known(point.n_clusters)
      ? `${unstable}${what} among ${plural(n, "user")} at lam = ${number(lams[chosen])}${sure}.`
      : plural(n, "user") + ".";
  byId("subtitle").textContent = doc.subtitle || "";
  byId("groups").textContent = (doc.groups && doc.groups.sentence) || "";
  byId("reduced").textContent = doc.reduced
    ? `This page shows ${integer(doc.reduced.shown)} of ${integer(doc.reduced.users)} users; ` +
      `the number of ${word}s, the objective and the gap are those of all users, sizes count the users shown.`
    : "";
  for (const id of ["subtitle", "groups", "reduced"]) byId(id).hidden = !byId(id).textContent;
  const names = {
    evidence: "Evidence",
    path: "Path",
    map: "Map",
    scores: "Scores",
    users: "Users",
    coefficients: "Models",
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
    slider.setAttribute("aria-valuetext", `lam ${number(lams[state.at])}, ${plural(point.n_clusters, word)}`);
    byId("now-lam").textContent = number(lams[state.at]);
    byId("now-clusters").textContent = integer(point.n_clusters);
    byId("now-clusters-name").textContent = point.n_clusters === 1 ? word : `${word}s`;
    byId("now-gap").textContent = number(point.gap, 2);
    byId("previous").disabled = state.at === 0;
    byId("next").disabled = state.at === last;
    byId("back").disabled = state.at === chosen;
    byId("chip").hidden = state.selected === null;
    byId("chip-text").textContent = state.selected ? `Selection: ${plural(state.selected.size, "user")}` : "";
  });
}

for (const setUp of [
  setUpTheme,
  setUpControl,
  setUpEvidence,
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
