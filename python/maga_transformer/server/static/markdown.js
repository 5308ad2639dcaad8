// A model's text as nodes of the page. Text only ever becomes text nodes, and links lead to http(s): nothing in it can run or load.

const BLOCKS = [
  [/^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/, fence],
  [/^ {0,3}(#{1,6})\s+(.*?)\s*#*$/, heading],
  [/^ {0,3}([-*_])(?:\s*\1){2,}\s*$/, rule],
  [/^ {0,3}> ?/, quotation],
  [/^(\s*)(?:[-*+]|\d{1,9}[.)])\s+/, list],
  [/^\s*\|.*\|\s*$/, table],
];
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])\s+(.*)$/;
const INLINE =
  /(`+)(.+?)\1(?!`)|\*\*(?=[^\s*])(.+?[^\s*]|[^\s*])\*\*(?!\*)|\*(?=[^\s*])(.+?[^\s*]|[^\s*])\*(?!\*)|~~(?=\S)(.+?\S)~~|!?\[([^\]\n]*)\]\(\s*(\S+?)\s*\)|(https?:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?)\]}])/;
const DEPTH = 8;

/** A fragment of the page. */
export function render(text) {
  const out = document.createDocumentFragment();
  blocks(text.split("\n"), out, 0);
  return out;
}

function blocks(lines, out, depth) {
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) inline(paragraph.join("\n"), out.appendChild(element("p")), 0);
    paragraph = [];
  };
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    if (!line.trim()) {
      flush();
      at += 1;
      continue;
    }
    const kind = depth < DEPTH && BLOCKS.find(([begins]) => begins.test(line));
    const used = kind ? kind[1](lines, at, out, depth, flush) : 0;
    if (used) {
      at += used;
    } else {
      paragraph.push(line);
      at += 1;
    }
  }
  flush();
}

// Each of these adds a block that begins at a line, and returns how many lines it took; 0: it is none after all.

function fence(lines, at, out, depth, flush) {
  flush();
  const [, mark, language] = BLOCKS[0][0].exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(mark)) end += 1;
  const box = out.appendChild(element("div", "code"));
  const head = box.appendChild(element("div"));
  head.append(element("span", "", language || "code"));
  const copy = head.appendChild(element("button", "plain", "Copy"));
  copy.type = "button";
  copy.dataset.copy = "code";
  box.appendChild(element("pre")).append(element("code", "", lines.slice(at + 1, end).join("\n")));
  return end - at + 1;
}

function heading(lines, at, out, depth, flush) {
  flush();
  const [, marks, words] = BLOCKS[1][0].exec(lines[at]);
  inline(words, out.appendChild(element(`h${Math.min(6, marks.length + 3)}`)), 0); // below the page's own
  return 1;
}

function rule(lines, at, out, depth, flush) {
  flush();
  out.append(element("hr"));
  return 1;
}

function quotation(lines, at, out, depth, flush) {
  flush();
  let end = at;
  while (end < lines.length && BLOCKS[3][0].test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(BLOCKS[3][0], ""));
  blocks(inner, out.appendChild(element("blockquote")), depth + 1);
  return end - at;
}

function list(lines, at, out, depth, flush) {
  flush();
  const [, indent, , number] = ITEM.exec(lines[at]) ?? [];
  if (indent === undefined) return 0;
  const box = out.appendChild(element(number ? "ol" : "ul"));
  if (number && number !== "1") box.start = Number(number);
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length !== indent.length || Boolean(item[3]) !== Boolean(number)) break;
    const inner = [item[4]];
    const deeper = new RegExp(`^\\s{${indent.length + 2},}\\S`);
    end += 1;
    while (end < lines.length) {
      if (deeper.test(lines[end])) inner.push(lines[end].slice(indent.length + 2));
      else if (!lines[end].trim() && deeper.test(lines[end + 1] ?? "")) inner.push("");
      else if (lines[end].trim() && !BLOCKS.some(([begins]) => begins.test(lines[end]))) inner.push(lines[end].trim());
      else break;
      end += 1;
    }
    while (!lines[end]?.trim() && ITEM.exec(lines[end + 1] ?? "")?.[1].length === indent.length) end += 1;
    const entry = box.appendChild(element("li"));
    blocks(inner, entry, depth + 1);
    if (entry.firstElementChild?.tagName === "P") entry.firstElementChild.replaceWith(...entry.firstElementChild.childNodes);
  }
  return end - at;
}

function table(lines, at, out, depth, flush) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  if (!/^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?)?\s*\|?\s*$/.test(lines[at + 1] ?? "")) return 0;
  flush();
  const box = out.appendChild(element("div", "table")).appendChild(element("table"));
  let end = at;
  for (; end < lines.length && BLOCKS[5][0].test(lines[end]); end += 1) {
    if (end === at + 1) continue;
    const row = box.appendChild(element("tr"));
    for (const cell of cells(lines[end])) inline(cell, row.appendChild(element(end === at ? "th" : "td")), 0);
  }
  return end - at;
}

function inline(text, out, depth) {
  let rest = text;
  for (let found; depth < DEPTH && (found = INLINE.exec(rest)); rest = rest.slice(found.index + found[0].length)) {
    plain(rest.slice(0, found.index), out);
    const [whole, ticks, code, bold, italic, struck, label, target, url] = found;
    if (ticks) out.append(element("code", "", code.trim() || code));
    else if (bold !== undefined) inline(bold, out.appendChild(element("strong")), depth + 1);
    else if (italic !== undefined) inline(italic, out.appendChild(element("em")), depth + 1);
    else if (struck !== undefined) inline(struck, out.appendChild(element("s")), depth + 1);
    else if (url || /^https?:\/\//i.test(target)) out.append(link(url ?? target, url ?? (label || target)));
    else plain(whole, out);
  }
  plain(rest, out);
}

function plain(text, out) {
  text.split("\n").forEach((line, index) => {
    if (index) out.append(element("br"));
    if (line) out.append(line);
  });
}

function link(target, words) {
  const anchor = element("a", "", words);
  anchor.href = target;
  anchor.target = "_blank";
  anchor.rel = "noopener noreferrer nofollow";
  return anchor;
}

export function element(tag, kind = "", words = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (words) made.textContent = words;
  return made;
}
