// Replaces the dashboard's main part by a newer one, again and again, and says so when none comes.
//
// What somebody is doing in the page survives it: the place scrolled to, the element in focus, what is folded open. Numbers that
// are old are never shown as if they were new. For tests and for other scripts, document hears "writegate:refresh" and
// says "writegate:refreshed" or "writegate:failed".
"use strict";
(() => {
  const every = Number(document.currentScript.dataset.every) || 5000;
  const patience = Math.max(every, 10000); // milliseconds until a server that does not answer is taken for gone
  const says = document.getElementById("live-says");
  const button = document.getElementById("live-pause");
  let timer = 0;
  let busy = false;
  let paused = false;

  const at = () => document.querySelector("main").dataset.at;

  // The text is set only when it changes for good: a screen reader reads each change.
  function say(state, text) {
    const root = document.documentElement;
    if (root.dataset.live !== state) {
      root.dataset.live = state;
      says.textContent = text;
    }
  }

  function sayRefreshing() {
    const s = every / 1000;
    say("on", "Refreshes itself every " + (s < 120 ? s + " s" : Math.round(s / 60) + " min"));
  }

  function schedule() {
    clearTimeout(timer);
    if (!paused && !document.hidden) {
      timer = setTimeout(refresh, every);
    }
  }

  // Text that is being selected would be lost with the elements it is in.
  function selecting() {
    const s = document.getSelection();
    return s && !s.isCollapsed && document.querySelector("main").contains(s.anchorNode);
  }

  async function fetchPage() {
    const response = await fetch(location.href, {
      cache: "no-store", redirect: "error", signal: AbortSignal.timeout(patience), headers: { Accept: "text/html" },
    });
    const body = await response.text();
    if (!response.ok) {
      throw new Error("it answered " + response.status + ": " + body.trim().slice(0, 200));
    }
    const page = new DOMParser().parseFromString(body, "text/html");
    if (!page.querySelector("main[data-at]")) {
      throw new Error("it answered with something else than this page");
    }
    return page;
  }

  function replace(page) {
    const old = document.querySelector("main");
    const main = document.importNode(page.querySelector("main"), true);
    for (const d of main.querySelectorAll("details[id]")) {
      const was = document.getElementById(d.id);
      if (was && was.tagName === "DETAILS") {
        d.open = was.open;
      }
    }
    // The focused element, and where to put the focus if it is gone: the nearest around it that is still there.
    const ids = [];
    const tag = document.activeElement;
    if (old.contains(tag)) {
      const inside = [...(tag.closest("[id]") || old).querySelectorAll("a, summary, [tabindex]")].indexOf(tag);
      for (let e = tag; e && e !== old; e = e.parentElement) {
        if (e.id) {
          ids.push({ id: e.id, inside: e === tag || ids.length ? -1 : inside });
        }
      }
      ids.push({ id: "main", inside: -1 });
    }
    const scrolled = [];
    for (const e of old.querySelectorAll("[aria-labelledby].wide")) {
      scrolled.push([e.getAttribute("aria-labelledby"), e.scrollLeft]);
    }
    const x = window.scrollX;
    const y = window.scrollY;
    const shapes = page.querySelector("svg.shapes"); // the grid in it belongs to the charts
    if (shapes) {
      document.querySelector("svg.shapes").replaceWith(document.importNode(shapes, true));
    }
    old.replaceWith(main);
    document.title = page.title;
    for (const [name, left] of scrolled) {
      const e = main.querySelector('.wide[aria-labelledby="' + name + '"]');
      if (e) {
        e.scrollLeft = left;
      }
    }
    for (const { id, inside } of ids) {
      let e = document.getElementById(id);
      if (e && inside >= 0) {
        e = e.querySelectorAll("a, summary, [tabindex]")[inside] || e;
      }
      if (e) {
        e.focus({ preventScroll: true });
        if (document.activeElement === e) {
          break;
        }
      }
    }
    window.scrollTo({ left: x, top: y, behavior: "instant" });
  }

  async function refresh() {
    clearTimeout(timer);
    if (busy) {
      return;
    }
    if (selecting()) {
      say("held", "Waits while text is selected: what is below was read at " + at());
      schedule();
      return;
    }
    busy = true;
    let said = "writegate:refreshed";
    try {
      const page = await fetchPage();
      replace(page);
      if (paused) {
        sayPaused();
      } else {
        sayRefreshing();
      }
    } catch (e) {
      said = "writegate:failed";
      const why = e.name === "TimeoutError" ? "it does not answer" : e.message;
      say("gone", "No answer since " + at() + ": what is below is old (" + why + ")");
    } finally {
      busy = false;
      schedule();
    }
    document.dispatchEvent(new CustomEvent(said));
  }

  function sayPaused() {
    delete document.documentElement.dataset.live;
    say("paused", "Paused: what is below was read at " + at());
  }

  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Go on" : "Pause";
    if (paused) {
      clearTimeout(timer);
      sayPaused();
    } else {
      refresh();
    }
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      clearTimeout(timer);
    } else if (!paused) {
      refresh();
    }
  });
  document.addEventListener("writegate:refresh", refresh);

  document.getElementById("live").hidden = false;
  sayRefreshing();
  schedule();
})();
