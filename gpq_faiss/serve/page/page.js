// The page lists items of every label, searches by an image or an item, and shows the results, with
// more of them on scrolling. Nothing is loaded from other sites, and no text is inserted as markup.
"use strict";

const byId = (id) => document.getElementById(id);
const FEW = 24; // items shown first, and added whenever the end comes into view
// query: { id } or { file }, null while browsing; shown: ids of the items on the page; wanted: the
// number of requested items.
const state = {
  info: null, query: null, file: null, running: null, shown: new Set(), wanted: 0, failed: false,
};

// Ids have 64 bits and JavaScript's numbers only 53, so ids are kept as text.
const read = async (response) =>
  JSON.parse((await response.text()).replace(/"id":\s*(-?\d+)/g, '"id":"$1"'));
const isId = (text) => /^-?(0|[1-9]\d{0,18})$/.test(text);
const number = (n) => n.toLocaleString("en");
const element = (tag, properties, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};
const span = (className, ...children) => element("span", { className }, ...children);

async function call(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The service does not answer.");
  });
  if (response.status === 401) {
    byId("sign-in").hidden = false;
    byId("token").focus();
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({})); // not an error of this service
    throw new Error(body.error ?? `status ${response.status}`);
  }
  return response;
}

function fail(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

// A file, or an item's thumbnail. It is fetched by script, as an image element sends no token.
async function picture(image, source, instead) {
  try {
    image.src = URL.createObjectURL(
      source.file ??
        (await (await call(`/items/${source.id}/thumbnail`, { priority: "low" })).blob()),
    );
    await image.decode();
    image.classList.toggle("small", image.naturalWidth <= 64);
  } catch {
    instead();
  } finally {
    URL.revokeObjectURL(image.src);
  }
}

function card(item) {
  const id = `#${item.id}`;
  const description = [item.name ?? id];
  const button = element("button", { type: "button" });
  button.dataset.id = item.id;
  if (state.info.thumbnails) {
    const image = element("img", { alt: "" });
    button.append(image);
    picture(image, item, () => image.replaceWith(span("none", id)));
  }
  button.append(span("", description[0]));
  if (item.labels) {
    description.push(item.labels.join(", "));
    button.append(span("labels", description[1]));
  }
  if (item.name) button.append(span("faint", id));
  if (item.score !== undefined) {
    const score = item.score.toFixed(3);
    const bar = span("bar");
    bar.dataset.score = item.score;
    button.append(span("faint score", span("scale", bar), score));
    description.push(`score ${score}`);
  }
  button.setAttribute("aria-label", `${description.join(", ")}: search by it`);
  return element("li", {}, button);
}

// The path and the options of a search.
function request(allow) {
  const deny = byId("deny").value.split(/[\s,]+/).filter(Boolean);
  if (!deny.every(isId)) throw new Error("Without ids: whole numbers are needed.");
  const { id, file } = state.query;
  if (file) {
    const form = new FormData();
    form.append("k", state.wanted);
    for (const label of allow) form.append("allow_labels", label);
    for (const id of deny) form.append("deny_ids", id);
    form.append("image", file);
    return ["/search/image", { body: form }];
  }
  const labels = allow.length ? `,"allow_labels":${JSON.stringify(allow)}` : "";
  const body = `{"id":${id},"k":${state.wanted},"deny_ids":[${deny.join(",")}]${labels}}`;
  return ["/search", { body, headers: { "content-type": "application/json" } }];
}

async function results(signal) {
  const allow = [...byId("labels").querySelectorAll(":checked")].map((box) => box.value);
  if (state.query) {
    const start = performance.now();
    const [path, options] = request(allow);
    const answer = await read(await call(path, { method: "POST", signal, ...options }));
    const ms = (performance.now() - start).toFixed(0);
    return [
      answer.results,
      `${answer.results.length} results, ${ms} ms, of ${number(answer.ntotal)} items`,
    ];
  }
  const parameters = new URLSearchParams([
    ["k", state.wanted],
    ...allow.map((label) => ["label", label]),
  ]);
  const answer = await read(await call(`/items?${parameters}`, { signal }));
  return [
    answer.items,
    `${answer.items.length} of ${number(answer.ntotal)} items: choose one to search by it`,
  ];
}

// With more, the items on the page stay, with their pictures and the focus.
function show(more, [items, status]) {
  if (!more) {
    byId("results").replaceChildren();
    state.shown.clear();
  }
  byId("results").append(...items.filter((item) => !state.shown.has(item.id)).map(card));
  for (const item of items) state.shown.add(item.id);
  const scores = items.map((item) => item.score);
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  for (const bar of byId("results").querySelectorAll(".bar")) {
    bar.style.width = `${high > low ? (100 * (bar.dataset.score - low)) / (high - low) : 100}%`;
  }
  byId("scale").textContent =
    `Bars run from the worst result shown (score ${low.toFixed(3)}) ` +
    `to the best (${high.toFixed(3)}).`;
  byId("status").textContent = status;
  byId("scale").hidden = !state.query || !items.length;
  byId("more").hidden = items.length < state.wanted || state.wanted >= state.info.max_k;
  // An observer reports only changes: observe again, in case the end is still in view.
  nearEnd.unobserve(byId("more"));
  if (!byId("more").hidden) nearEnd.observe(byId("more"));
}

async function load(more = false) {
  if (!state.info) return;
  state.running?.abort();
  const running = (state.running = new AbortController());
  more = more && !state.failed; // after an error, the page shows an earlier query
  const before = state.wanted;
  state.wanted = Math.min((more ? before : 0) + FEW, state.info.max_k);
  document.body.classList.add("busy");
  try {
    show(more, await results(running.signal));
    state.failed = false;
    fail("");
  } catch (error) {
    if (error.name !== "AbortError") {
      state.wanted = before;
      state.failed = !more;
      fail(error.message);
    }
  } finally {
    if (state.running === running) {
      state.running = null;
      document.body.classList.remove("busy");
    }
  }
}

const nearEnd = new IntersectionObserver((entries) => {
  const isInView = entries.some((entry) => entry.isIntersecting);
  if (isInView && !state.running && !byId("more").hidden) load(true);
}, { rootMargin: "300px" });

// Search by a query, which is shown next to the fields as a picture and a text.
function search(query, text) {
  state.query = query;
  byId("id").value = query.id ?? "";
  byId("asked").hidden = false;
  byId("asked-text").textContent = text;
  byId("asked-labels").textContent = "";
  const image = element("img", { id: "asked-image", alt: `Query: ${text}` });
  byId("asked-image").replaceWith(image);
  if (query.file || state.info.thumbnails) picture(image, query, () => (image.hidden = true));
  else image.hidden = true;
  load();
}

function byFile(file) {
  if (!file || !state.info) return;
  if (state.info.input !== "images")
    return fail("The model takes features, not images: search by an item's id.");
  if (file.size > state.info.max_upload)
    return fail(`The image has more than ${number(state.info.max_upload)} bytes.`);
  if (location.hash) history.pushState(null, "", location.pathname);
  state.file = file;
  search({ file }, file.name || "pasted image");
}

async function byIdOrName(text) {
  let id = text;
  try {
    if (!isId(text))
      id = (await read(await call(`/items?${new URLSearchParams({ k: 1, name: text })}`)))
        .items[0]?.id;
  } catch (error) {
    return fail(error.message);
  }
  if (!id) return fail(`No item has the name ${text}.`);
  if (location.hash === `#${id}`) fromHash();
  else location.hash = id; // so that Back leads to the previous query
}

async function fromHash() {
  if (!state.info) return;
  const id = location.hash.slice(1);
  if (!isId(id)) return state.file ? byFile(state.file) : browse(); // Back to an image
  byId("file").value = "";
  // The chosen item is removed from the page, and the focus would be lost with it.
  const chosen = byId("results").contains(document.activeElement);
  search({ id }, `item ${id}`);
  if (chosen) byId("asked").focus({ preventScroll: true });
  try { // errors are reported by the search
    const item = await read(await call(`/items/${id}`));
    if (state.query?.id !== id) return;
    byId("asked-text").textContent = item.name ?? `item ${id}`;
    byId("asked-labels").textContent = (item.labels ?? []).join(", ");
  } catch { /* not there */ }
}

function browse() {
  byId("id").value = byId("file").value = "";
  state.query = state.file = null;
  byId("asked").hidden = true;
  load();
}

async function start() {
  try {
    const info = (state.info = await read(await call("/info")));
    byId("sign-in").hidden = true;
    fail("");
    byId("about").textContent = `${number(info.ntotal)} items, ${info.bits} bits each`;
    byId("drop").hidden = info.input !== "images";
    byId("labels").hidden = !info.labels.length;
    const chips = info.labels.slice(0, 1000).map((value, n) =>
      element(
        "label",
        {},
        element("input", { type: "checkbox", value }),
        value,
        span("count", number(info.label_counts[n])),
      ));
    byId("labels").replaceChildren(byId("labels").firstElementChild, ...chips);
    document.body.dataset.ready = "yes";
    fromHash();
  } catch (error) {
    fail(error.message);
  }
}

byId("file").addEventListener("change", (event) => byFile(event.target.files[0]));
document.addEventListener("paste", (event) =>
  byFile([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));
for (const name of ["dragover", "drop"])
  document.addEventListener(name, (event) => event.preventDefault());
document.addEventListener("drop", (event) => byFile(event.dataTransfer.files[0]));
byId("query").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("id").value.trim();
  if (id && id !== state.query?.id) byIdOrName(id);
  else if (state.query) load();
  else fail("Choose an image, or give an item's id or name.");
});
for (const name of ["labels", "deny"]) byId(name).addEventListener("change", () => load());
byId("more").addEventListener("click", () => load(true));
byId("clear").addEventListener("click", () => {
  if (location.hash) history.pushState(null, "", location.pathname);
  browse();
  byId("results").focus({ preventScroll: true });
});
byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value);
  start();
});
byId("results").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  byIdOrName(button.dataset.id);
  window.scrollTo({ top: 0 });
});
window.addEventListener("hashchange", fromHash);
start();
