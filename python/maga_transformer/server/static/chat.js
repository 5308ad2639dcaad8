// The conversation: what was said, what is being said, and the buttons beside it.
import { facts, watch } from "./engine.js";
import { element, render } from "./markdown.js";
import { defaults, headers, restore, sampling, system } from "./settings.js";
import { ask } from "./stream.js";

const at = (id) => document.getElementById(id);
const [log, scroll, text, composer] = ["log", "scroll", "text", "composer"].map(at);
const STORE = "maga.turns";
const turns = JSON.parse(sessionStorage.getItem(STORE) ?? "[]"); // {role, content, thoughts?, told?, error?}
let model = null;
let running = null; // AbortController of the answer that is being written

restore();
turns.forEach(show);
settle();
watch(headers, meet);

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  say(text.value.trim());
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    say(text.value.trim());
  }
});
text.addEventListener("input", grow);
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => {
  running?.abort();
  cut(0);
  text.focus();
});
at("toggle").addEventListener("click", () => {
  const side = at("side");
  const wide = matchMedia("(min-width: 64rem)").matches;
  const open = side.classList.toggle(wide ? "closed" : "open") !== wide;
  at("toggle").setAttribute("aria-expanded", String(open));
});
if (matchMedia("(min-width: 64rem)").matches) at("toggle").setAttribute("aria-expanded", "true");
log.addEventListener("click", press);

function meet(told) {
  if (model?.name === told.name && model?.version === told.version) return;
  model = told;
  at("model").textContent = document.title = model.name;
  at("greeting").textContent = !model.generates
    ? "This model embeds or scores texts; it does not write any."
    : model.chats
      ? "Ask the model something."
      : "This model has no chat template: it continues the text that you give it.";
  text.placeholder = model.chats || !model.generates ? "Message" : "Text to continue";
  facts(model);
  defaults(model);
  settle();
}

async function say(words) {
  if (!words || running || !model?.generates) return;
  text.value = "";
  grow();
  turns.push({ role: "user", content: words });
  show(turns.at(-1));
  await answer();
}

async function answer() {
  const turn = { role: "assistant", content: "", thoughts: "" };
  const asked = turns.filter((one, i) => one.content && !one.error && !(one.role === "user" && empty(turns[i + 1])));
  turns.push(turn);
  const place = show(turn);
  place.classList.add("writing");
  running = new AbortController();
  settle();
  const begun = performance.now();
  let first = 0;
  let usage = null;
  let finish = "";
  let drawn = 0;
  const redraw = () => {
    cancelAnimationFrame(drawn);
    drawn = requestAnimationFrame(() => draw(turn, place));
  };
  try {
    for await (const chunk of ask(...request(asked), headers(), running.signal)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const { content, reasoning_content, reasoning } = choice.delta ?? { content: choice.text };
      if (content || reasoning_content || reasoning) first ||= performance.now();
      turn.content += content ?? "";
      turn.thoughts += reasoning_content ?? reasoning ?? "";
      finish = choice.finish_reason ?? finish;
      turn.told = speed(usage, begun, first, "");
      redraw();
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else turn.error = error instanceof TypeError ? "The connection to the server broke." : error.message;
  }
  cancelAnimationFrame(drawn);
  turn.told = speed(usage, begun, first, finish);
  running = null;
  place.classList.remove("writing");
  draw(turn, place);
  settle();
  keep();
  if (document.activeElement === document.body) text.focus(); // the button that was pressed is gone
  at("said").textContent = turn.error ? `Error: ${turn.error}` : `Answer complete: ${turn.told}`;
}

/** Whether a turn brought nothing; what it should have answered is not asked again, as most templates want turns to alternate. */
const empty = (turn) => turn !== undefined && (turn.error || !turn.content);

/** Path and body. */
function request(asked) {
  const common = { model: model.name, ...sampling() };
  if (!model.chats) return ["v1/completions", { prompt: asked.at(-1).content, ...common }];
  const messages = asked.map(({ role, content }) => ({ role, content }));
  if (system()) messages.unshift({ role: "system", content: system() });
  return ["v1/chat/completions", { messages, ...common }];
}

function speed(usage, begun, first, finish) {
  const tokens = usage?.completion_tokens ?? 0;
  if (!first) return finish;
  const seconds = (performance.now() - first) / 1000;
  const parts = [`${tokens} tokens`];
  const rate = tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0;
  if (rate) parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
  parts.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
  if (finish === "length") parts.push("cut at the limit of tokens");
  else if (finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function show(turn) {
  const place = log.appendChild(element("article", `turn ${turn.role}`));
  place.append(element("h3", "", turn.role === "user" ? "You" : "Model"), element("div", "body"), element("div", "foot"));
  draw(turn, place);
  return place;
}

function draw(turn, place) {
  const near = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  const [, body, foot] = place.children;
  if (turn.role === "user") {
    body.textContent = turn.content;
  } else {
    const open = body.querySelector("details")?.open ?? true;
    body.replaceChildren(render(turn.content));
    if (turn.thoughts) {
      const box = element("details", "thoughts", turn.thoughts);
      box.prepend(element("summary", "", "Thoughts"));
      box.open = open && !turn.content;
      body.prepend(box);
    }
    place.classList.toggle("error", Boolean(turn.error));
    if (turn.error) body.append(element("p", "", turn.error));
  }
  const writing = place.classList.contains("writing");
  const actions = writing ? [] : turn.role === "user" ? ["Edit"] : ["Copy", "Again"];
  foot.replaceChildren(...actions.map((name) => button(name)), element("span", "told", turn.told ?? ""));
  if (near) scroll.scrollTop = scroll.scrollHeight;
}

function button(name) {
  const made = element("button", "plain", name);
  made.type = "button";
  made.dataset.action = name;
  return made;
}

async function press({ target }) {
  if (target.dataset.copy === "code") {
    await copy(target, target.closest(".code").querySelector("code").textContent);
    return;
  }
  const index = [...log.children].indexOf(target.closest(".turn"));
  if (!target.dataset.action || index < 0) return;
  if (target.dataset.action === "Copy") {
    await copy(target, turns[index].content);
  } else if (!running && target.dataset.action === "Edit") {
    text.value = turns[index].content;
    cut(index);
    grow();
    text.focus();
  } else if (!running) {
    cut(index);
    await answer();
  }
}

async function copy(from, words) {
  try {
    await navigator.clipboard.writeText(words);
    from.textContent = "Copied";
  } catch {
    from.textContent = "Copying is not allowed here";
  }
  setTimeout(() => (from.textContent = "Copy"), 1500);
}

/** Forgets the turns from `index` on. */
function cut(index) {
  turns.length = index;
  while (log.children.length > index) log.lastChild.remove();
  settle();
  keep();
}

function settle() {
  at("empty").hidden = turns.length > 0;
  at("send").hidden = Boolean(running);
  at("stop").hidden = !running;
  at("send").disabled = !model?.generates;
  log.setAttribute("aria-busy", String(Boolean(running)));
}

function keep() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(turns));
  } catch {
    sessionStorage.removeItem(STORE); // more than a tab may keep
  }
}

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}
