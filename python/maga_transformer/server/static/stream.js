// A streamed answer of /v1/chat/completions or /v1/completions, chunk by chunk.

/** Yields the chunks. Throws an Error with the server's own words. */
export async function* ask(path, body, headers, signal) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  if (!answer.ok) throw new Error(await refusal(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

async function refusal(answer) {
  const text = await answer.text();
  try {
    const said = JSON.parse(text);
    const message = said.error?.message ?? said.message;
    return answer.status === 401 ? `${message} (the panel has a field for the API key)` : message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}
