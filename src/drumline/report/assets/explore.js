/* Sliders that ask the Python core: every number and picture on this page was computed there. */

const extra = JSON.parse(byId("extra").textContent);
const form = byId("controls"), inputs = [...form.querySelectorAll("[name]")];
const REST_MS = 150;
let own = null, asking = false, latest = 0, explaining = new AbortController(), dragging = false, moved = -Infinity;

function query() {
  const parts = new URLSearchParams();
  for (const input of inputs) parts.set(input.name, input.value);
  return parts;
}

function node(tag, text = "", cls = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (cls) made.className = cls;
  return made;
}

function label() {
  for (const input of inputs) {
    const shown = input.parentElement.querySelector("output");
    if (shown) shown.textContent = Number(input.value) === 0 && ["stages_per_rank", "max_activations"].includes(input.name)
      ? (input.name === "max_activations" ? "none" : "default") : input.value;
  }
  const about = extra.schedules[form.elements.schedule.value];
  byId("about").textContent = about ? about.summary : "";
  for (const name of ["schedule", "ranks", "microbatches", "stages_per_rank", "slices"]) form.elements[name].disabled = own !== null;
  if (own === null && about) form.elements.stages_per_rank.disabled = about.stages === "fixed";
  byId("own").textContent = own === null ? "Drop your own CSV here, or click to choose one" : `Shown: ${own.name}`;
  byId("forget").hidden = own === null;
}

function figures({ summary, against, over_limit }) {
  const share = (value) => `${(100 * value).toFixed(2)}%`;
  const entries = [
    ["makespan", (one) => Number(one.makespan.toPrecision(6))],
    ["bubble", (one) => share(one.bubble)],
    ["span bubble", (one) => share(one.span_bubble)],
    ["peak activations", (one) => Math.max(...one.peak_activations), over_limit.length > 0],
    ["stages", (one) => one.stages],
    ["actions", (one) => one.actions],
  ];
  byId("figures").replaceChildren(...entries.map(([name, value, over]) => {
    const made = node("div", "", over ? "over" : "");
    made.append(node("b", String(value(summary))));
    if (against) made.append(node("b", String(value(against)), "against"));
    made.append(node("span", over ? `${name}, over the limit on rank ${over_limit.join(", ")}` : name));
    made.dataset.figure = name;
    return made;
  }));
}

function trouble(answer) {
  const box = byId("trouble"), bad = answer.error ?? answer.violations;
  document.body.classList.toggle("dim", Boolean(bad));
  box.hidden = !bad;
  if (!bad) return;
  if (answer.error) {
    const { error, expected, fix } = answer.error;
    box.replaceChildren(node("h2", error), node("div", [expected && `expected ${expected}`, fix].filter(Boolean).join("; ")));
    return;
  }
  const list = node("ul");
  for (const { rank, index, action, reason } of answer.violations.slice(0, 50)) {
    const where = [rank !== null && `rank ${rank}`, index !== null && `position ${index}`].filter(Boolean).join(", ");
    list.append(node("li", `${where}${where ? ": " : ""}${action ?? ""} ${reason}`));
  }
  const count = answer.violations.length;
  box.replaceChildren(node("h2", `${count} violation${count === 1 ? "" : "s"}: this program cannot run`), list, program(answer));
}

/* The rows, with actions that break a rule marked. */
function program({ rows, violations }) {
  const made = node("div", "", "program"), marked = new Map();
  for (const { rank, index, reason } of violations) if (index !== null) marked.set(`${rank}/${index}`, reason);
  rows.slice(0, 64).forEach((row, rank) => {
    const line = node("div");
    line.append(node("b", `rank ${rank}`));
    row.slice(0, 400).forEach((action, index) => {
      const reason = marked.get(`${rank}/${index}`), cell = node(reason ? "mark" : "span", action);
      if (reason) cell.title = reason;
      line.append(cell);
    });
    made.append(line);
  });
  return made;
}

/* Ask the core; if it does not answer, show that and return null. */
async function ask(what, address, signal = null) {
  try {
    return await (await fetch(`${what}?${address}`, { signal, ...(own === null ? {} : { method: "POST", body: own.text }) })).json();
  } catch (error) {
    if (error.name !== "AbortError") trouble({ error: { error: "the server does not answer", expected: "", fix: "start drumline explore again" } });
    return null;
  }
}

/* Show the current settings. One request at a time: if settings change meanwhile, the newest are requested next. */
async function refresh() {
  latest += 1;
  label();
  explaining.abort();
  if (asking) return;
  asking = true;
  try {
    for (let turn = 0; turn !== latest;) {
      turn = latest;
      await show(turn);
    }
  } finally {
    asking = false;
  }
}

async function show(turn) {
  const start = performance.now(), address = query();
  if (own === null) history.replaceState(null, "", `?${address}`);
  const answer = await ask("answer", address);
  if (!answer) return;
  trouble(answer);
  if (answer.document) {
    window.drumline.load(answer.document);
    figures(answer);
  }
  document.documentElement.dataset.answered = String(turn);
  document.documentElement.dataset.answerMs = (performance.now() - start).toFixed(0);
  if (turn !== latest) return;
  if (answer.document && !answer.document.timelines[0].why) explain(turn, address);
  else document.documentElement.dataset.explained = String(turn);
}

/* Explanations follow the picture: at once, or during a drag when it rests. Those for an older picture are dropped. */
async function explain(turn, address) {
  const { signal } = explaining = new AbortController();
  if (dragging) await new Promise((rested) => setTimeout(rested, REST_MS));
  if (signal.aborted) return;
  const answer = await ask("explanations", address, signal);
  if (!answer?.why || turn !== latest) return;
  window.drumline.learn(answer.why);
  if (answer.against) window.drumline.learn(answer.against, 1);
  document.documentElement.dataset.explained = String(turn);
}

async function take(kind) {
  const address = query();
  address.set("kind", kind);
  const answer = await fetch(`export?${address}`, own === null ? {} : { method: "POST", body: own.text });
  if (!answer.ok) return trouble(await answer.json());
  const name = /filename="([^"]+)"/.exec(answer.headers.get("Content-Disposition"))?.[1] ?? "drumline";
  const link = node("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function choose(file) {
  if (!file) return;
  own = { name: file.name, text: await file.text() };
  refresh();
}

/* The picture comes first and stays in view; the controls are beside or below it. In a narrow window only the timelines
   stay: their headings have the figures that matter. What is read first is also reached first. */
const stage = node("div", "", "stage"), work = node("div", "", "work"), narrow = matchMedia("(max-width: 999px)");
const [numbers, troubles, toolbar, signs, charts] = [byId("figures"), byId("trouble"), document.querySelector(".toolbar"), byId("legend"), byId("charts")];

function arrange() {
  if (narrow.matches) {
    stage.replaceChildren(troubles, charts);
    work.replaceChildren(numbers, stage, toolbar, signs, form);
  } else {
    stage.replaceChildren(numbers, troubles, toolbar, signs, charts);
    work.replaceChildren(stage, form);
  }
}
document.querySelector("main").prepend(work);
arrange();
narrow.addEventListener("change", arrange);
page.boxes.listen(stage);

for (const input of inputs) {
  const start = extra.settings[input.name];
  if (Number(input.max) < Number(start)) input.max = start;
  input.value = start;
}
form.addEventListener("input", (event) => {
  if (event.target.id === "file") return;
  dragging = event.timeStamp - moved < REST_MS;
  moved = event.timeStamp;
  refresh();
});
form.addEventListener("submit", (event) => event.preventDefault());
const drop = byId("drop"), file = byId("file");
drop.addEventListener("click", (event) => { if (event.target.id !== "forget") file.click(); });
drop.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") file.click(); });
file.addEventListener("change", () => { choose(file.files[0]); file.value = ""; });
byId("forget").addEventListener("click", (event) => { event.stopPropagation(); own = null; refresh(); });
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
document.addEventListener("dragleave", () => drop.classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  choose(event.dataTransfer.files[0]);
});
for (const button of document.querySelectorAll("[data-kind]")) button.onclick = () => take(button.dataset.kind);
byId("share").onclick = async (event) => {
  let copied = true;
  try {
    await navigator.clipboard.writeText(location.href);
  } catch {
    copied = false; // a browser that forbids it: the address bar has the same link
  }
  event.target.textContent = copied ? "Copied" : "Copy it from the address bar";
  setTimeout(() => { event.target.textContent = "Copy link"; }, 1200);
};
refresh();
