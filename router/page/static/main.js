// Assembles the page: views, API key, theme.

import { Api, ApiError } from "./api.js";
import { ChatView } from "./chat.js";
import { byId, notify } from "./dom.js";
import { FleetView } from "./fleet.js";

const KEY = "rayfleet.key";
const THEME = "rayfleet.theme";
/** Ids of the views. They follow #/ in the URL, since # alone would move the focus to the view. */
const VIEWS = ["chat", "fleet"];

const api = new Api(askForKey);
api.key = recall(sessionStorage, KEY) ?? "";
const fleet = new FleetView(api);
const chat = new ChatView(api, (...request) => fleet.addRequest(...request));

byId("no-key").addEventListener("click", () => byId("key-dialog").close("cancel"));
setUpTabs();
setUpTheme();
byId("key-button").addEventListener("click", async () => {
  const key = await askForKey();
  if (key === null) return;
  api.key = key;
  offerModels();
});
offerModels();

async function offerModels() {
  notify("");
  try {
    chat.offer((await api.json("v1/models")).data);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    notify(error.message);
  }
}

let asking = null;

/** Prompts the user for the key, once for all concurrent callers; null if none is entered. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key").value = "";
    dialog.returnValue = "cancel";
    dialog.showModal();
    dialog.addEventListener("close", () => resolve(givenKey(dialog)), { once: true });
  }).finally(() => (asking = null));
  return asking;
}

function givenKey(dialog) {
  const field = byId("key");
  const key = field.value.trim();
  field.value = "";
  if (dialog.returnValue !== "use") return null;
  keep(sessionStorage, KEY, byId("keep-key").checked ? key : null);
  return key;
}

function setUpTabs() {
  const tabs = VIEWS.map((name) => byId(`tab-${name}`));
  const select = (chosen) => {
    VIEWS.forEach((name, index) => {
      const isChosen = index === chosen;
      tabs[index].setAttribute("aria-selected", String(isChosen));
      tabs[index].tabIndex = isChosen ? 0 : -1;
      byId(name).hidden = !isChosen;
    });
    notify("");
    fleet.show(VIEWS[chosen] === "fleet");
    history.replaceState(null, "", `#/${VIEWS[chosen]}`);
  };
  const MOVES = { ArrowRight: 1, ArrowLeft: -1 };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => select(index));
    tab.addEventListener("keydown", ({ key }) => {
      if (!(key in MOVES)) return;
      const next = (index + MOVES[key] + tabs.length) % tabs.length;
      tabs[next].focus();
      select(next);
    });
  });
  select(Math.max(VIEWS.indexOf(location.hash.slice(2)), 0));
}

function setUpTheme() {
  const root = document.documentElement;
  const apply = (theme) => {
    if (theme) root.dataset.theme = theme;
  };
  apply(recall(localStorage, THEME));
  byId("theme-button").addEventListener("click", () => {
    const isDark = getComputedStyle(root).colorScheme === "dark";
    apply(isDark ? "light" : "dark");
    keep(localStorage, THEME, root.dataset.theme);
  });
}

// Browsers may block storage for this page; the key is then requested again.

function recall(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return null;
  }
}

function keep(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, value);
  } catch {
    // the key is requested again
  }
}
