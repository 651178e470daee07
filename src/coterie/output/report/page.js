// The header, the control and the start.

import { byId, element, known, measure, number, plural, redrawAll, integer } from "./basics.js";
import {
  chosen, counted, doc, everyone, lams, move, noun, points, select, separate, sharing, show, state, views, word,
} from "./model.js";
import { setUpPath } from "./path.js";
import { setUpMap } from "./map.js";
import { setUpScores, setUpTable } from "./people.js";
import { setUpCoefficients, setUpShares } from "./coefficients.js";
import { setUpEvidence, setUpStability } from "./evidence.js";
import { setUpAbout, setUpCertificate, setUpFederated, setUpPrivacy } from "./proof.js";

function setUpHeader() {
  const point = points[chosen] || {},
    said = doc.headline || {};
  const unstable = doc.groups && doc.groups.stability && !doc.groups.stability.stable ? "Unstable groups: " : "";
  const what = counted(point.n_clusters);
  const counts =
    lams.length && known(point.n_clusters)
      ? `${what[0].toUpperCase()}${what.slice(1)} among ${plural(everyone, noun)} at penalty strength ${number(lams[chosen])}.`
      : plural(everyone, noun) + ".";
  byId("answer").textContent = unstable + [said.found || counts, said.better].filter(Boolean).join(" ");
  for (const id of ["helps", "sure"]) {
    byId(id).querySelector("dd").textContent = said[id] || "";
    byId(id).hidden = !said[id];
  }
  byId("warnings").append(
    ...(doc.warnings || []).map((text) => element("p", {}, element("strong", { text: "Warning: " }), text)),
  );
  byId("warnings").hidden = !(doc.warnings || []).length;
  const sure = known(point.gap);
  const of = doc.privacy ? " for the released statistics" : "";
  byId("badge").textContent = sure ? `Optimum certified${of}, gap ${number(point.gap, 2)}` : "Optimum not certified";
  byId("badge").classList.toggle("open", !sure);
  byId("badge").hidden = byId("certificate").hidden;
  byId("subtitle").textContent = doc.subtitle || "";
  byId("reduced").textContent = doc.reduced
    ? `This page shows ${integer(doc.reduced.shown)} of ${integer(doc.reduced.users)} users; ` +
      `the number of ${word}s, the objective and the gap are those of all users, sizes count the users shown.`
    : "";
  for (const id of ["subtitle", "reduced"]) byId(id).hidden = !byId(id).textContent;
  const names = {
    evidence: "Evidence",
    stability: "Stability",
    personal: "Personal",
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
  setUpEvidence,
  setUpStability,
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
