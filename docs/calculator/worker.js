// Python beside the page: loads Pyodide and memlab, then answers questions one by one.
import { loadPyodide } from "./pyodide/pyodide.mjs";

// Pyodide waits for ever where its WebAssembly doesn't come or doesn't compile: said from here.
const fail = (error) => self.postMessage({ kind: "failed", reason: String(error.message || error) });

// The bytes that arrive, for the progress bar: counted on a copy, so that the browser may cache its compiled code.
const fetched = self.fetch.bind(self);
let loaded = 0;
self.fetch = async (...request) => {
  const name = String(request[0].url ?? request[0]).split("/").pop();
  const response = await fetched(...request).catch((error) => {
    throw new Error(`${name} didn't come (${error.message})`);
  });
  if (!response.ok) throw new Error(`${name} didn't come (${response.status} ${response.statusText})`);
  if (response.body) count(response.clone().body.getReader()).catch(() => {});
  return response;
};

// And a server that doesn't know the type application/wasm serves as well.
const { instantiate, instantiateStreaming } = WebAssembly;
WebAssembly.instantiateStreaming = async (source, imports) => {
  try {
    const response = await source;
    const known = (response.headers.get("Content-Type") ?? "").startsWith("application/wasm");
    return await (known ? instantiateStreaming(response, imports) : instantiate(await response.arrayBuffer(), imports));
  } catch (error) {
    fail(error);
    throw error;
  }
};

async function count(reader) {
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    loaded += part.value.length;
    self.postMessage({ kind: "loading", loaded });
  }
}

async function start() {
  const [python, memlab] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    fetch(new URL("./memlab.zip", import.meta.url)).then((response) => response.arrayBuffer()),
  ]);
  self.postMessage({ kind: "starting" });
  python.unpackArchive(memlab, "zip");
  const ask = python.pyimport("answers").ask;
  self.postMessage({ kind: "ready", python: python.runPython("import sys; sys.version.split()[0]") });
  return (kind, question, data) => ask(kind, question, data ? python.toPy(data) : undefined);
}

const asked = start();
asked.catch(fail);

self.onmessage = async ({ data: { id, kind, question, data } }) => {
  let ask;
  try {
    ask = await asked;
  } catch {
    return; // said already
  }
  const began = performance.now();
  let answer;
  try {
    answer = ask(kind, question, data);
  } catch (error) {
    // a stack or memory that ended inside Python: after that it answers nothing more
    self.postMessage({ kind: "died", id, reason: String(error.message || error).trim().split("\n").pop() });
    return;
  }
  self.postMessage({ kind: "answer", id, answer, ms: performance.now() - began });
};
