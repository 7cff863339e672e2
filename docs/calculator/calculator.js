// The page: choices in, answers out. What is computed comes from memlab, in a worker (worker.js, answers.py);
// what came from outside (a pasted text, a link) only ever enters the page as text.

const CHOICES = JSON.parse(document.getElementById("choices").textContent);
const { consumers: CONSUMERS, phases: PHASES, colours: COLOURS, defaults: DEFAULTS } = CHOICES;
const OFFLOADED = ["optimizer_states", "parameters", "gradients", "activations"];
const PASTE = "\u0000paste"; // no model's name
const START = { model: "llama2-7b", gpu: "A100-80GB" };
const LONGEST_LINK = 8000;

const $ = (id) => document.getElementById(id);
const said = (name) => name.replaceAll("_", " ");

/** An element with attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// -- Python in a worker -------------------------------------------------------------------------------------

class Room {
  constructor(notice = () => {}) {
    this.waiting = new Map();
    this.next = 0;
    this.notice = notice;
    this.begin();
  }

  begin() {
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => {
      if (data.kind === "answer") {
        this.waiting.get(data.id)?.resolve({ answer: parsed(data.answer), ms: data.ms });
        this.waiting.delete(data.id);
      } else if (data.kind === "died") {
        this.again(data);
      } else {
        this.notice(data);
        if (data.kind === "failed") this.fail(data.reason);
      }
    };
    this.worker.onerror = (event) => {
      event.preventDefault();
      const reason = event.message || "a script couldn't be loaded";
      this.notice({ kind: "failed", reason });
      this.fail(reason);
    };
  }

  /** A new Python for one that ended: the question that ended it is answered so, the others are asked again. */
  again({ id, reason }) {
    this.worker.terminate();
    this.begin();
    this.waiting.get(id)?.resolve({ answer: { error: `Python failed on this question and was started anew: ${reason}` }, ms: 0 });
    this.waiting.delete(id);
    for (const { asked } of this.waiting.values()) this.worker.postMessage(asked);
  }

  fail(reason) {
    this.failed = reason;
    for (const { resolve } of this.waiting.values()) resolve({ answer: { error: `Python didn't start: ${reason}` }, ms: 0 });
    this.waiting.clear();
  }

  ask(kind, question, data) {
    if (this.failed) return Promise.resolve({ answer: { error: `Python didn't start: ${this.failed}` }, ms: 0 });
    const id = this.next++;
    const asked = { id, kind, question: JSON.stringify(question), data };
    return new Promise((resolve) => {
      this.waiting.set(id, { resolve, asked });
      this.worker.postMessage(asked);
    });
  }

  close() {
    this.worker.terminate();
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    return { error: `memlab's answer can't be read (${error.message}): please report it with this page's link` };
  }
}

const quick = new Room(loading);
// Searches and long logs have a Python of their own: the choices answer meanwhile, and a Cancel ends it.
let slow = null;

function loading(message) {
  const bar = $("load-bar");
  if (message.kind === "loading") {
    bar.max = CHOICES.bytes;
    bar.value = Math.min(message.loaded, CHOICES.bytes);
    const [have, all] = [message.loaded, CHOICES.bytes].map((n) => (n / 1e6).toFixed(1));
    $("load-text").textContent = `Loading Python, ${have} of ${all} MB`;
  } else if (message.kind === "starting") {
    bar.removeAttribute("value");
    $("load-text").textContent = "Starting Python";
  } else if (message.kind === "ready") {
    $("version").textContent = `${CHOICES.version} (Python ${message.python}, MPL 2.0).`;
  } else {
    $("loading").hidden = true;
    const file = location.protocol === "file:";
    problem(file
      ? "A browser runs no Python from a file: serve this folder, for example with python -m http.server, and open that address."
      : `Python didn't start: ${message.reason}. Reload the page; an old browser may lack WebAssembly or module workers.`);
  }
}

// -- the form -----------------------------------------------------------------------------------------------

const form = $("choices-form"), planForm = $("plan-form");
const control = (name) => (name ? form.elements.namedItem(name) ?? planForm.elements.namedItem(name) : null);
const NUMBERS = ["world_size", "micro_batch", "accumulation", "sequence", "image", "tensor_parallel", "lora_rank", "dropout"];
const BACK = Object.create(null); // no "constructor" in it; each control's value on a fresh page

function options(name, values) {
  const select = control(name);
  for (const value of values) {
    const { name: key, text } = typeof value === "string" ? { name: value, text: value } : value;
    select.append(make("option", { value: key }, text));
  }
}

function fill() {
  const groups = { "Language models": false, "Image models": true };
  for (const [label, images] of Object.entries(groups)) {
    const group = make("optgroup", { label });
    for (const { name, text } of CHOICES.models.filter((m) => m.images === images)) group.append(make("option", { value: name }, text));
    control("model").append(group);
  }
  control("model").append(make("option", { value: PASTE }, "paste a config.json …"));
  options("gpu", CHOICES.gpus);
  for (const name of ["precision", "optimizer", "optimizer_impl", "attention", "base_weights"]) options(name, CHOICES[name]);
  for (const what of OFFLOADED)
    options(`off-${what}`, [{ name: "", text: "GPU" }, { name: "cpu", text: "host memory" }, { name: "nvme", text: "NVMe" }]);
  options("plan_link", CHOICES.link);
  options("plan_inter_link", CHOICES.inter_link);
  for (const name of CHOICES.lora_targets) $("targets").append(make("option", { value: name }));
  for (const name of NUMBERS) if (DEFAULTS[name] !== null) control(name).value = DEFAULTS[name];
  for (const name of ["precision", "optimizer", "checkpointing", "attention", "base_weights", "lora_targets"]) control(name).value = DEFAULTS[name];
  control("model").value = START.model;
  control("gpu").value = START.gpu;
  control("every").value = 2;
  control("plan_mfu").value = 0.4;
  for (const element of [...form.elements, ...planForm.elements]) if (element.name) BACK[element.name] = value(element);
}

const value = (element) => (element.type === "checkbox" ? String(Number(element.checked)) : element.value);

/** The value of the option that `text` names, as the command line takes names: any case, a card by its beginning. */
function named(element, text) {
  const values = [...element.options].map((option) => option.value);
  if (values.includes(text)) return text;
  const key = (name) => name.toLowerCase().replaceAll(/[-_ ]/g, "");
  const same = values.filter((name) => key(name) === key(text));
  const begin = element.name === "gpu" && text ? values.filter((name) => key(name).startsWith(key(text))) : [];
  const found = same.length ? same : begin;
  return found.length === 1 ? found[0] : undefined;
}

function put(element, text) {
  if (element.options) {
    const found = named(element, text);
    if (found === undefined) return false;
    element.value = found;
    return true;
  }
  if (element.type === "checkbox") element.checked = text === "1";
  else element.value = text;
  return value(element) === text;
}

const known = () => CHOICES.models.find((model) => model.name === control("model").value);

/** Shows what this model has a use for. */
function arrange() {
  const images = known()?.images ?? false;
  for (const element of document.querySelectorAll("[data-for]")) element.hidden = element.dataset.for !== (images ? "images" : "tokens");
  if (images && control("checkpointing").value === "selective") control("checkpointing").value = "none";
  $("paste-field").hidden = control("model").value !== PASTE;
  $("every-field").hidden = control("checkpointing").value !== "every";
  const size = known()?.size;
  control(images ? "image" : "sequence").placeholder = size ? String(size) : "the model's context";
  const adapters = control("lora_rank").value !== "";
  for (const name of ["base_weights", "lora_targets"]) {
    control(name).disabled = !adapters;
  }
}

/** A number as Python wants it: an integer where it is one; what isn't a number as text, for memlab to refuse. */
function number(element) {
  if (element.validity.badInput) return "this";
  return element.value === "" ? null : Number(element.value);
}

function question() {
  const pasted = control("model").value === PASTE;
  const images = known()?.images ?? false;
  const recipe = {};
  for (const name of NUMBERS) {
    if (control(name).closest("[data-for]")?.hidden) continue;
    const given = number(control(name));
    if (given !== null) recipe[name] = given;
  }
  for (const name of ["precision", "optimizer", ...(images ? [] : ["attention"])]) recipe[name] = control(name).value;
  if (control("optimizer_impl").value) recipe.optimizer_impl = control("optimizer_impl").value;
  recipe.zero_stage = Number(control("zero_stage").value);
  const every = control("every").value || "?";
  recipe.checkpointing = control("checkpointing").value === "every" ? `every-${every}` : control("checkpointing").value;
  recipe.set_to_none = control("set_to_none").checked;
  recipe.offload = OFFLOADED.map((what) => [what, control(`off-${what}`).value]).filter(([, where]) => where).map((pair) => pair.join(":"));
  if (recipe.lora_rank !== undefined) {
    recipe.base_weights = control("base_weights").value;
    recipe.lora_targets = control("lora_targets").value || DEFAULTS.lora_targets;
  }
  return { model: pasted ? null : control("model").value, config: pasted ? control("config").value : null, gpu: control("gpu").value, recipe };
}

/** Sets the form to a recipe that memlab gave. */
function adopt(recipe) {
  const texts = { ...Object.fromEntries(Object.entries(recipe).map(([name, v]) => [name, v === null ? "" : String(v)])) };
  texts.set_to_none = String(Number(recipe.set_to_none));
  const every = recipe.checkpointing.startsWith("every-");
  if (every) [texts.checkpointing, texts.every] = ["every", recipe.checkpointing.slice(6)];
  if (Array.isArray(recipe.lora_targets)) texts.lora_targets = recipe.lora_targets.join(",");
  for (const what of OFFLOADED) texts[`off-${what}`] = recipe.offload.find((item) => item.startsWith(`${what}:`))?.split(":")[1] ?? "";
  if (recipe.sequence === known()?.size) texts.sequence = "";
  if (recipe.image === known()?.size) texts.image = "";
  for (const [name, text] of Object.entries(texts)) if (name in BACK) put(control(name), text);
  for (const id of ["adapters", "more"]) open(id);
}

function open(id) {
  const room = $(id);
  if ([...room.querySelectorAll("[name]")].some((element) => value(element) !== BACK[element.name])) room.open = true;
}

// -- the link -----------------------------------------------------------------------------------------------

function link() {
  const parts = new URLSearchParams();
  for (const [name, back] of Object.entries(BACK)) {
    const element = control(name), now = value(element);
    if (name === "model" && now !== PASTE) parts.set("model", now);
    else if (name === "gpu") parts.set("gpu", now);
    else if (name === "config") { if (control("model").value === PASTE && now.trim()) parts.set("config", shorter(now)); }
    else if (name !== "model" && now !== back) parts.set(name, now);
  }
  const tab = document.body.dataset.tab;
  if (tab !== "fit") parts.set("tab", tab);
  return `#${parts}`;
}

function shorter(text) {
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return text;
  }
}

/** Reads the link into the form; says what it didn't know. */
function follow() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const strange = [];
  for (const [name, back] of Object.entries(BACK)) put(control(name), back);
  for (const [name, text] of parts) {
    if (name === "tab") {
      if (!$(`tab-${text}`)) strange.push(`${name}=${text}`);
    } else if (name === "config") {
      control("model").value = PASTE;
      control("config").value = text;
    } else if (!(name in BACK) || !put(control(name), text)) {
      strange.push(`${name}=${text}`);
      if (name in BACK) put(control(name), BACK[name]);
    }
  }
  for (const id of ["adapters", "more"]) open(id);
  arrange();
  show($(`tab-${parts.get("tab")}`) ? parts.get("tab") : "fit");
  $("link-said").textContent = strange.length ? `The link holds what isn't known here, and it was left out: ${strange.join(", ").slice(0, 300)}` : "";
  changed();
}

let linking = 0;
let lastLink = "";
function relink() {
  clearTimeout(linking);
  linking = setTimeout(() => {
    lastLink = link();
    if (lastLink.length <= LONGEST_LINK) history.replaceState(null, "", lastLink);
  }, 150);
}

// -- does it fit --------------------------------------------------------------------------------------------

let pending = false, running = false, began = 0, last = null;

function changed() {
  arrange();
  relink();
  began = performance.now();
  pending = true;
  stale();
  if (!running) answer();
}

async function answer() {
  running = true;
  while (pending) {
    pending = false;
    const from = began;
    const { answer: found, ms } = await quick.ask("footprint", question());
    if (pending) continue; // there is a newer question
    if (quick.failed) break; // said where it happened
    $("loading").hidden = true;
    found.error === undefined ? render(found) : problem(found.error);
    const took = performance.now() - from;
    timing(took, ms);
  }
  running = false;
}

let first = 0;
function timing(took, ms) {
  if (!first) {
    first = performance.now();
    $("timing").textContent = `First answer ${(first / 1000).toFixed(1)} s after the page was opened.`;
  } else {
    $("timing").textContent = `Answered in ${took.toFixed(0)} ms, ${ms.toFixed(0)} of them memlab's.`;
  }
  Object.assign($("timing").dataset, { took: took.toFixed(1), memlab: ms.toFixed(1), first: first.toFixed(0) });
}

/** The name of the control that a reason speaks of: its first word, or what stands for it. */
function culprit(reason) {
  if (control("model").value === PASTE && /config/.test(reason)) return "config";
  const word = reason.split(/[\s:]/)[0];
  if (word === "offload" || word === "4-bit") return "off-parameters";
  if (word === "adapters") return "tensor_parallel";
  if (word === "batch") return "micro_batch";
  if (CHOICES.optimizer.includes(word)) return "optimizer_impl";
  if (/ has no dropout/.test(reason)) return "dropout";
  return word in BACK ? word : "";
}

/** Puts the reason beneath the control that it speaks of; "" takes it away. */
const REASON = make("small", { id: "reason", class: "problem" });
function mark(reason) {
  for (const element of form.querySelectorAll("[aria-invalid]")) {
    element.removeAttribute("aria-invalid");
    const hints = element.getAttribute("aria-describedby").replace(/ ?reason/, "");
    hints ? element.setAttribute("aria-describedby", hints) : element.removeAttribute("aria-describedby");
  }
  REASON.remove();
  const element = reason ? control(culprit(reason)) : null;
  if (!element) return;
  REASON.textContent = reason;
  element.parentElement.append(REASON);
  element.setAttribute("aria-invalid", "true");
  element.setAttribute("aria-describedby", `${element.getAttribute("aria-describedby") ?? ""} reason`.trim());
}

function verdict(state, headline, lead) {
  $("result").dataset.state = state;
  if ($("headline").textContent !== headline) $("headline").textContent = headline;
  if ($("lead").textContent !== lead) $("lead").textContent = lead;
  $("glance").textContent = state === "error" ? lead : headline;
}

function problem(reason) {
  verdict("error", "No answer for this combination", reason);
  $("answer").hidden = true;
  mark(reason);
  last = null;
}

// As units.py: footprint speaks of GiB, plan of GB, like the two commands.
const BINARY = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const DECIMAL = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3], ["B", 1]];
const unitOf = (bytes, units = BINARY) => units.find(([, scale]) => bytes >= scale) ?? units.at(-1);
const inUnit = (bytes, [, scale]) => {
  const digits = scale === 1 ? 0 : 2;
  return (bytes / scale).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};
const sized = (bytes, units = BINARY) => `${inUnit(bytes, unitOf(Math.abs(bytes), units))} ${unitOf(Math.abs(bytes), units)[0]}`;

function render(found) {
  last = found;
  mark("");
  verdict(found.state, found.headline, `${found.heading}\n${found.recipe.replaceAll("\n", " ")}`);
  $("answer").hidden = false;
  const peak = found.phases[found.peak_phase];
  chart(found);
  $("chart-said").textContent =
    `Peak ${sized(found.peak_bytes)} in ${found.peak_phase}: ${found.moment}. ` +
    CONSUMERS.filter((c) => peak[c]).map((c) => `${said(c)} ${sized(peak[c])}`).join(", ") +
    `. ${found.gpu} holds ${sized(found.capacity)}.`;

  const unit = unitOf(found.peak_bytes);
  const head = make("tr", {}, make("td"), ...PHASES.map((phase) => make("th", { scope: "col", class: phase === found.peak_phase ? "n here" : "n" }, phase)),
    make("th", { scope: "col", class: "n" }, "own largest"));
  const rows = [...CONSUMERS, "total"].map((name) => {
    const label = make("th", { scope: "row" }, name === "total" ? null : swatch(name), name === "total" ? "total" : `\u2060${said(name)}`);
    const cells = PHASES.map((phase) => amount(found.phases[phase][name], unit, phase === found.peak_phase));
    return make("tr", name === "total" ? { class: "sum" } : { "data-consumer": name }, label, ...cells,
      name === "total" ? make("td") : amount(found.consumers[name], unit));
  });
  const caption = make("caption", {}, `${unit[0]} at each phase's largest moment; the peak is in ${found.peak_phase}`);
  $("consumers").replaceChildren(caption, make("thead", {}, head), make("tbody", {}, ...rows));

  $("outside").textContent = found.host.length ? `Outside the GPU: ${found.host.map((pair) => pair.join(" ")).join(", ")}.` : "";

  const account = found.account.map(([name, size, words, why]) =>
    make("tr", {}, make("th", { scope: "row" }, name, make("br"), make("span", { class: "mark" }, why)), make("td", { class: "n", "data-bytes": size }, words)));
  account.push(make("tr", { class: "sum" }, make("th", { scope: "row" }, "needed, to be sure"), make("td", { class: "n", "data-bytes": found.needed[0] }, found.needed[1])));
  account.push(make("tr", {}, make("th", { scope: "row" }, `${found.gpu} has`), make("td", { class: "n", "data-bytes": found.capacity }, sized(found.capacity))));
  $("account").replaceChildren(make("tbody", {}, ...account));

  const titles = ["tensor", "consumer", "shape", "dtype", "bytes", "why it is there"];
  $("tensors").replaceChildren(
    make("caption", {}, `${found.tensors.length} of ${found.tensor_count} kinds of tensors that the step keeps`),
    make("thead", {}, make("tr", {}, ...titles.map((t) => make("th", { scope: "col", class: t === "bytes" ? "n" : "" }, t)))),
    make("tbody", {}, ...found.tensors.map(([name, consumer, shape, dtype, bytes, why]) => make("tr", {},
      make("th", { scope: "row" }, name), make("td", {}, said(consumer)), make("td", {}, shape), make("td", {}, dtype), make("td", { class: "n" }, bytes), make("td", {}, why)))));

  $("includes").textContent = found.includes;
  $("notes").replaceChildren(...found.notes.map((note) => make("li", {}, note)));
  $("command").replaceChildren(...whole(found.command));
  $("prints").textContent = `It prints this table and ends with “${found.verdict.replaceAll("\n", "; ")}”: the step's tensors alone, without what is added above.`;
  $("oom-model").textContent = `${found.heading.split(":")[0]}, ${found.recipe.replaceAll("\n", " ")}`;
  control("plan_batch").placeholder = `${found.batch}, as chosen`;
}

function amount(bytes, unit, here = false) {
  return make("td", { class: here ? "n here" : "n", "data-bytes": bytes, title: `${bytes.toLocaleString("en")} B` }, inUnit(bytes, unit));
}

// -- bars: colour, pattern and words ------------------------------------------------------------------------

// Lines and dots over each fill, so that colour is never alone; the memory map of a message is grey.
const MAPPED = {
  tensors: ["#5B6570", "none"], "cached, in no tensor": ["#A9B4BF", "slant"], "context and libraries": ["#D5DBE1", "dots"],
  "context or others": ["#D5DBE1", "dots"], "other processes": ["#D55E00", "cross"],
};
const FILLS = {
  parameters: [COLOURS.parameters, "none"], gradients: [COLOURS.gradients, "slant"], optimizer_states: [COLOURS.optimizer_states, "dots"],
  activations: [COLOURS.activations, "cross"], temporaries: [COLOURS.temporaries, "upright"], ...MAPPED,
};
const patternOf = (name) => `fill-${name.replaceAll(/[^a-z_]/g, "-")}`;

function dark(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => {
    const part = parseInt(colour.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.18;
}

function patterns() {
  for (const [name, [colour, kind]] of Object.entries(FILLS)) {
    const ink = dark(colour) ? "#FFFFFF" : "#000000";
    const line = { stroke: ink, "stroke-opacity": 0.38, "stroke-width": 1.2 };
    const pattern = drawn("pattern", { id: patternOf(name), width: 8, height: 8, patternUnits: "userSpaceOnUse" }, drawn("rect", { width: 8, height: 8, fill: colour }));
    if (kind === "slant" || kind === "cross") pattern.append(drawn("path", { d: "M-2 2L2 -2M0 8L8 0M6 10L10 6", ...line }));
    if (kind === "cross") pattern.append(drawn("path", { d: "M-2 6L2 10M0 0L8 8M6 -2L10 2", ...line }));
    if (kind === "upright") pattern.append(drawn("path", { d: "M4 0V8", ...line }));
    if (kind === "dots") pattern.append(drawn("circle", { cx: 4, cy: 4, r: 1.3, fill: ink, "fill-opacity": 0.5 }));
    $("patterns").append(pattern);
  }
}

function swatch(name) {
  const square = drawn("svg", { class: "swatch", viewBox: "0 0 16 16", "aria-hidden": "true" });
  square.append(drawn("rect", { x: 0.5, y: 0.5, width: 15, height: 15, fill: `url(#${patternOf(name)})` }));
  return square;
}

const BRIEF = { parameters: "parameters", gradients: "gradients", optimizer_states: "states", activations: "activations", temporaries: "temporaries" };

/**
 * Stacked bars on one scale. rows: {label, bold, parts: [[name, bytes]], total, after}; limit: {bytes, text, usable};
 * most: the scale's end, if other pictures share it; axis: with a scale beneath.
 */
function bars(rows, limit, alternative, width, { left = 84, thick = 30, units = BINARY, most = 0, axis = true } = {}) {
  const largest = Math.max(most, limit.bytes, ...rows.map((row) => row.total));
  const inner = width - left - 8, x = (bytes) => left + (inner * bytes) / largest;
  const top = limit.text ? 22 : 6, gap = 14, bottom = top + rows.length * (thick + gap) - gap + 6;
  const height = bottom + (axis ? 20 : 2);
  const svg = drawn("svg", { class: "bars", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": alternative });
  const labels = drawn("g"); // over the card's end
  const write = (text, at, y, anchor, kind) => {
    const word = drawn("text", { x: at, y, "text-anchor": anchor, class: kind }, text);
    labels.append(word);
    return word;
  };
  rows.forEach((row, place) => {
    const y = top + place * (thick + gap), base = y + thick / 2 + 4;
    write(row.label, 0, base, "start", row.bold ? "peak" : "");
    let from = 0;
    for (const [name, bytes] of row.parts) {
      if (bytes <= 0) continue;
      const [a, b] = [x(from), x(from + bytes)];
      from += bytes;
      const filled = name in FILLS;
      const segment = drawn("rect", { x: a, y, width: Math.max(b - a, 0.5), height: thick, class: filled ? "segment" : "hold" },
        drawn("title", {}, `${said(name)}: ${sized(bytes, units)} (${bytes.toLocaleString("en")} B)`));
      if (filled) segment.setAttribute("fill", `url(#${patternOf(name)})`);
      svg.append(segment);
      const words = [`${BRIEF[name] ?? said(name)} ${sized(bytes, units)}`, sized(bytes, units)].find((text) => text.length * 6.7 + 6 < b - a);
      if (!words) continue;
      const long = words.length * 6.7 + 4, middle = (a + b) / 2;
      if (filled) labels.append(drawn("rect", { x: middle - long / 2, y: base - 13, width: long, height: 18, rx: 3, fill: FILLS[name][0] }));
      const word = write(words, middle, base, "middle", "");
      if (filled) word.style.fill = dark(FILLS[name][0]) ? "#FFFFFF" : "#111111";
    }
    const end = x(row.total);
    if (row.after && end + 10 + row.after.length * 6.7 < width) write(row.after, end + 6, base, "start", row.bold ? "peak" : "soft");
  });
  const end = x(limit.bytes);
  if (limit.usable !== undefined) {
    const begin = x(limit.usable);
    svg.append(drawn("rect", { x: begin, y: top - 4, width: end - begin, height: bottom - top + 4, class: "hold" },
      drawn("title", {}, `context: ${sized(limit.bytes - limit.usable, units)}`)));
  }
  svg.append(drawn("line", { x1: end, x2: end, y1: top - 6, y2: bottom, class: "limit" }));
  if (limit.text) {
    const before = end > width / 2;
    write(limit.text, before ? Math.min(end + 4, width) : end - 4, 11, before ? "end" : "start", "limit-text");
  }
  svg.append(labels);
  if (!axis) return svg;
  const unit = unitOf(largest, units), step = nice(largest / unit[1] / Math.max(2, Math.floor(inner / 110)));
  for (let tick = 0; tick * unit[1] <= largest * 1.0001; tick += step) {
    const at = x(tick * unit[1]);
    write(`${Number(tick.toPrecision(3))}${tick ? "" : ` ${unit[0]}`}`, at, height - 4, tick === 0 ? "start" : at > width - 20 ? "end" : "middle", "soft");
  }
  return svg;
}

function nice(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].find((m) => m * power >= step) * power;
}

function chart(found) {
  const rows = PHASES.map((phase) => ({
    label: phase, bold: phase === found.peak_phase, total: found.phases[phase].total,
    parts: CONSUMERS.map((name) => [name, found.phases[phase][name]]), after: sized(found.phases[phase].total),
  }));
  const room = $("chart");
  const alternative = `Bytes of each phase by consumer against the card's capacity: ${rows.map((row) => `${row.label} ${row.after}`).join(", ")}; capacity ${sized(found.capacity)}`;
  const limit = { bytes: found.capacity, usable: found.capacity - found.context, text: `${found.gpu}: ${sized(found.capacity)}` };
  room.replaceChildren(bars(rows, limit, alternative, Math.max(room.clientWidth, 280)));
}

// -- what should I change -----------------------------------------------------------------------------------

let planned = null;

function planQuestion() {
  const asked = {
    start: control("plan_start").value, effective_batch: number(control("plan_batch")), lora: control("plan_lora").checked,
    host_memory: control("plan_host_memory").value.trim(), nvme: control("plan_nvme").value.trim(),
    link: control("plan_link").value, inter_link: control("plan_inter_link").value, mfu: number(control("plan_mfu")) ?? 0.4,
  };
  return { ...question(), plan: asked };
}

function stale() {
  if (!planned || $("plan-answer").hidden) return;
  const same = JSON.stringify(planQuestion()) === planned.asked;
  $("plan-result").textContent = same ? planned.said : "The choices have changed since this search: search again.";
}

/** A question to the other Python, with the seconds it takes and a Cancel. */
async function slowly(name, kind, asked, data) {
  const [go, cancel, bar, result, place] = ["go", "cancel", "bar", "result", "answer"].map((part) => $(`${name}-${part}`));
  slow?.busy?.();
  slow ??= new Room();
  const room = slow;
  const start = performance.now();
  go.disabled = true;
  cancel.hidden = bar.hidden = false;
  result.className = "";
  result.textContent = `${name === "plan" ? "Searching" : "Reading"} …`;
  const clock = setInterval(() => { bar.title = `${((performance.now() - start) / 1000).toFixed(0)} s`; }, 500);
  let stop;
  const stopped = new Promise((resolve) => { stop = () => resolve(null); });
  const cancelled = () => {
    room.close();
    slow = null;
    stop();
  };
  room.busy = cancelled;
  cancel.onclick = cancelled;
  const got = await Promise.race([room.ask(kind, asked, data), stopped]);
  room.busy = null;
  clearInterval(clock);
  cancel.hidden = bar.hidden = true;
  go.disabled = false;
  if (got === null) {
    result.textContent = "Cancelled.";
    go.focus();
    return null;
  }
  if (got.answer.error !== undefined) {
    result.className = "problem";
    result.textContent = got.answer.error;
    place.hidden = true;
    return null;
  }
  return { ...got.answer, took: (performance.now() - start) / 1000 };
}

async function plan(event) {
  event.preventDefault();
  const asked = planQuestion();
  const found = await slowly("plan", "plan", asked);
  if (!found) return;
  planned = { asked: JSON.stringify(asked), found, question: asked, said: `${found.headline} (${found.took.toFixed(1)} s).` };
  $("plan-result").textContent = planned.said;
  const place = $("plan-answer");
  place.hidden = false;
  place.replaceChildren(...planParts(found));
  drawSteps();
}

function planParts(found) {
  const parts = [make("p", {}, found.heading)];
  if (found.best) {
    parts.push(make("p", {}, `Peak ${found.best.peak} in ${found.best.phase}, ${found.best.left} left beyond the uncertainty; ${found.best.seconds} a batch: ${found.parts.map((pair) => pair.join(" ")).join(", ")}.`));
  } else if (found.nearest) {
    parts.push(make("p", {}, `The smallest: ${found.nearest.brief}, peak ${found.nearest.peak}${found.nearest.beside.map((text) => `, ${text}`).join("")}.`));
  }
  parts.push(make("h3", {}, "The seven steps, from your start"));
  parts.push(make("p", {}, `Start: ${found.start}. ${found.fits ? "It fits" : "It does not fit"}; ${found.bound}.`));
  parts.push(make("p", { class: "small" }, found.arithmetic));
  const list = make("ol", { class: "steps" });
  list.append(make("li", {}, make("p", {}, make("strong", {}, "0 start"), ` ${found.start_peak[1]} in ${found.start_peak[2]}`), make("div", { "data-bar": "start" })));
  found.steps.forEach((step, at) => {
    list.append(make("li", { class: step.taken ? "taken" : "" },
      make("p", {}, make("strong", {}, step.name), ` ${step.taken ? "taken" : "not taken"}`, make("span", { class: "mark" }, step.taken || !step.price ? ` · ${step.peak[1]} in ${step.peak[2]}` : ` · would lead to ${step.peak[1]}`)),
      make("p", {}, step.why),
      step.price ? make("p", { class: "small" }, `costs: ${step.price}`) : null,
      step.taken || step.price ? make("div", { "data-bar": at }) : null));
  });
  parts.push(list);
  const ranked = [
    ["Ways that fit, fastest first", found.candidates],
    ["Ways that also change training", found.alternatives],
    ["Faster, but too close for a closed form: only a trace decides", found.tight],
  ];
  for (const [title, ways] of ranked) {
    if (!ways.length) continue;
    parts.push(make("h3", {}, title), ...ways.map((way) => wayOf(way)));
  }
  if (found.best) parts.push(...exporter(found));
  parts.push(make("p", {}, `${found.largest}.`));
  const list_of = (lines) => make("ul", { class: "small" }, ...lines.map((line) => make("li", {}, line)));
  parts.push(make("details", {}, make("summary", {}, "What is assumed"), list_of(found.assumptions)));
  parts.push(make("details", {}, make("summary", {}, "What is held back"), list_of(found.held)));
  if (found.notes.length) parts.push(list_of(found.notes));
  parts.push(make("h3", {}, "The same on the command line"), command("plan-command", found.command),
    asJson(found.json),
    make("p", { class: "small" }, "Without --no-trace it also confirms the winner by tracing it on a virtual card; that needs torch, which a browser hasn't."));
  return parts;
}

function command(id, text) {
  return make("div", { class: "command" }, make("pre", { id, tabindex: 0, "aria-label": "Text to copy" }, ...(text.length < 2000 ? whole(text) : [text])), make("button", { type: "button", "data-copy": id }, "Copy"));
}

function asJson(data) {
  const button = make("button", { type: "button" }, "Copy as JSON (--json)"), done = make("span", { role: "status" });
  button.addEventListener("click", () => copy(data, done));
  return make("p", { class: "row" }, button, " ", done);
}

/** A command's words, none of them broken at a hyphen. */
function whole(text) {
  return text.split(/(\s+)/).map((word) => (word.trim() ? make("span", { class: "word" }, word) : word));
}

function wayOf(way) {
  const use = make("button", { type: "button" }, "Use");
  use.setAttribute("aria-label", `Use ${way.brief}`);
  use.addEventListener("click", () => {
    adopt(way.recipe);
    changed();
    show("fit");
    $("tab-fit").focus();
  });
  return make("div", { class: "way" },
    make("p", {}, make("strong", {}, way.brief)),
    make("p", { class: "figures" }, make("span", {}, `${way.seconds} a batch`), make("span", {}, `peak ${way.peak}`), make("span", {}, `${way.left} left`), ...way.beside.map((text) => make("span", {}, text)), use),
    way.changes.length ? make("p", { class: "small" }, `changes training: ${way.changes.join("; ")}`) : null);
}

function exporter(found) {
  const ways = [...found.candidates, ...found.alternatives];
  const which = make("select", { id: "export-way" }, ...ways.map((way, at) => make("option", { value: at }, way.brief)));
  const engine = make("select", { id: "export-engine" }, ...CHOICES.engines.map((name) => make("option", { value: name }, name)));
  const place = make("div", { id: "export-answer", role: "status" });
  const asked = planned.question;
  const write = async () => {
    const { answer: made } = await quick.ask("export", { ...asked, engine: engine.value, winner: ways[which.value].recipe, gpus_per_node: found.gpus_per_node });
    if (made.error !== undefined) {
      place.replaceChildren(make("p", { class: "problem" }, made.error));
      return;
    }
    const parts = Object.entries(made.files).flatMap(([name, text], at) => [make("p", {}, make("strong", {}, name)), command(`export-${at}`, text)]);
    place.replaceChildren(...parts, make("p", {}, "Start it with:"), command("export-command", made.command), make("ul", { class: "small" }, ...made.notes.map((note) => make("li", {}, note))));
  };
  which.addEventListener("change", write);
  engine.addEventListener("change", write);
  write();
  return [
    make("h3", {}, "As configuration"),
    make("div", { class: "fields" },
      make("div", { class: "field wide" }, make("label", { for: "export-way" }, "Recipe"), which),
      make("div", { class: "field" }, make("label", { for: "export-engine" }, "Engine"), engine)),
    place,
  ];
}

function drawSteps() {
  if (!planned || $("panel-plan").hidden) return;
  const { found } = planned;
  const all = { start: { consumers: found.start_consumers, peak: found.start_peak }, ...found.steps };
  const most = Math.max(found.capacity, ...Object.values(all).map((step) => step.peak[0]));
  const size = (bytes) => sized(bytes, DECIMAL);
  for (const place of $("plan-answer").querySelectorAll("[data-bar]")) {
    const step = all[place.dataset.bar];
    const row = { label: "", total: step.peak[0], parts: CONSUMERS.map((name) => [name, step.consumers[name]]) };
    const alternative = `${CONSUMERS.map((name) => `${said(name)} ${size(step.consumers[name])}`).join(", ")}; the card holds ${size(found.capacity)}`;
    const limit = { bytes: found.capacity, usable: found.capacity - found.context, text: place.dataset.bar === "start" ? `${found.gpu}: ${size(found.capacity)}` : "" };
    place.replaceChildren(bars([row], limit, alternative, Math.max(place.clientWidth, 260), { left: 2, thick: 22, units: DECIMAL, most, axis: false }));
  }
}

// -- an out-of-memory message -------------------------------------------------------------------------------

let explained = null;

async function explain(event) {
  event?.preventDefault();
  const file = $("oom-file").files[0];
  const asked = { ...question(), text: file ? "" : $("oom-text").value, file: file?.name ?? null, named: $("oom-named").checked };
  const found = await slowly("oom", "oom", asked, file ? new Uint8Array(await file.arrayBuffer()) : undefined);
  if (!found) return;
  explained = found;
  const more = found.count - found.reports.length + found.unread;
  $("oom-result").textContent = found.count === 1 && !more
    ? `One message read (${found.reports[0].place}).`
    : `${found.count} distinct messages; the first is the one to read, later ones are often its echo.${more ? ` ${more} more aren't shown here.` : ""}`;
  const place = $("oom-answer");
  place.hidden = false;
  const [head, ...rest] = found.reports;
  place.replaceChildren(reportOf(head),
    ...rest.map((report) => make("details", {}, make("summary", {}, `${report.place}: ${report.causes[0]?.[0] ?? report.head}`), reportOf(report))),
    make("h3", {}, "The same on the command line"), command("oom-command", found.command));
  place.append(asJson(found.json));
  drawMaps();
}

function reportOf(report) {
  const part = make("article", {}, make("h3", {}, report.head));
  if (report.note) part.append(make("p", {}, report.note));
  if (report.tensors.length)
    part.append(make("ul", {}, ...report.tensors.map(([name, shape, dtype, bytes]) => make("li", {}, `${name}: ${shape} ${dtype} = ${bytes}`))));
  for (const line of report.raised) part.append(make("p", {}, line));
  if (report.code) part.append(make("pre", { tabindex: 0, "aria-label": "Line of code" }, report.code));
  if (report.card) {
    const place = make("div", { "data-map": "" });
    place.map = report.card;
    part.append(make("h3", {}, "Who held the card"), place);
  }
  if (report.numbers.length) {
    part.append(make("h3", {}, "What the message says"), make("table", {}, make("tbody", {}, ...report.numbers.map(([name, size, note]) =>
      make("tr", {}, make("th", { scope: "row" }, name), make("td", { class: "n" }, size), make("td", { class: "small" }, note))))));
  }
  part.append(make("h3", {}, "Likely causes, the likeliest first"), make("ul", {}, ...report.causes.map(([label, why]) => make("li", {}, make("strong", {}, said(label)), `: ${why}`))));
  part.append(make("h3", {}, "What to do, in this order"), make("ol", {}, ...report.actions.map((action) => make("li", {}, action))));
  if (report.cannot_tell.length)
    part.append(make("h3", {}, "What the message can't tell, and what would decide"), make("ul", {}, ...report.cannot_tell.map((text) => make("li", {}, text))));
  return part;
}

function drawMaps() {
  for (const place of $("oom-answer").querySelectorAll("[data-map]")) {
    const { total, requested, parts } = place.map;
    const width = Math.max(place.clientWidth, 260);
    if (!place.clientWidth) continue; // in a closed part
    const rows = [{ label: "card", total, parts: parts.map(([name, bytes]) => [name, bytes]) }];
    if (requested) rows.push({ label: "asked for", total: requested, parts: [["request", requested]], after: sized(requested) });
    const key = make("ul", { class: "figures", "aria-label": "Parts of the card" }, ...parts.map(([name, , words]) => make("li", {}, name in MAPPED ? swatch(name) : null, `${name} ${words}`)));
    place.replaceChildren(bars(rows, { bytes: total, text: `${sized(total)} in all` }, parts.map(([name, , words]) => `${name} ${words}`).join(", "), width), key);
  }
}

// -- tabs, copying, and the start ---------------------------------------------------------------------------

const TABS = ["fit", "plan", "oom"];

function show(name) {
  document.body.dataset.tab = name;
  for (const tab of TABS) {
    $(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
    $(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
    $(`panel-${tab}`).hidden = tab !== name;
  }
  redraw();
  glance();
}

function redraw() {
  if (last && !$("panel-fit").hidden) chart(last);
  drawSteps();
  if (explained && !$("panel-oom").hidden) drawMaps();
}

async function copy(text, place) {
  try {
    await navigator.clipboard.writeText(text);
    place.textContent = "Copied.";
  } catch {
    place.textContent = "This browser doesn't let a page copy here: select the text.";
  }
  setTimeout(() => { place.textContent = ""; }, 4000);
}

/** On a narrow screen the answer lies below the form: its headline stays at the window's foot. */
let seen = true;
function glance() {
  $("glance").hidden = seen || document.body.dataset.tab === "oom" || document.body.dataset.tab === "plan";
}

function listen() {
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  planForm.addEventListener("input", () => { relink(); stale(); });
  planForm.addEventListener("submit", plan);
  $("oom-form").addEventListener("submit", explain);
  $("oom-text").addEventListener("paste", () => {
    $("oom-file").value = "";
    setTimeout(() => explain());
  });
  $("oom-file").addEventListener("change", () => { if ($("oom-file").files.length) explain(); });
  $("oom-text").addEventListener("input", () => { $("oom-file").value = ""; });
  $("oom-answer").addEventListener("toggle", drawMaps, true);
  for (const name of TABS) $(`tab-${name}`).addEventListener("click", () => { show(name); relink(); });
  $("tabs").addEventListener("keydown", (event) => {
    const at = TABS.indexOf(document.body.dataset.tab);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const name = TABS[(to + TABS.length) % TABS.length];
    show(name);
    relink();
    $(`tab-${name}`).focus();
  });
  addEventListener("hashchange", () => { if (location.hash !== lastLink) follow(); });
  addEventListener("resize", redraw);
  document.addEventListener("click", (event) => {
    const id = event.target.closest?.("[data-copy]")?.dataset.copy;
    if (!id) return;
    const place = event.target.parentElement.querySelector("[role=status]") ?? event.target.parentElement.appendChild(make("span", { role: "status" }));
    copy($(id).textContent, place);
  });
  $("copy-link").addEventListener("click", () => {
    const text = link();
    if (text.length > LONGEST_LINK) $("link-said").textContent = "The pasted config is too long for a link.";
    else copy(new URL(text, location.href).href, $("link-said"));
  });
  $("copy-json").addEventListener("click", async () => {
    const { answer: whole } = await quick.ask("footprint_json", question());
    copy(whole.json ?? whole.error, $("json-said"));
  });
  $("reset").addEventListener("click", () => {
    for (const [name, back] of Object.entries(BACK)) put(control(name), back);
    changed();
  });
  $("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the hash is the choices'
    $("main").focus();
  });
  $("glance").addEventListener("click", () => {
    $("main").focus({ preventScroll: true });
    $("result").scrollIntoView();
  });
  new IntersectionObserver(([entry]) => { seen = entry.isIntersecting; glance(); }).observe($("result"));
}

fill();
patterns();
listen();
follow();
