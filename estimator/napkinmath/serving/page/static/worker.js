// One interpreter, one question at a time: {path, body} in, {status, text} out.
import { loadPyodide } from "./pyodide.mjs";

async function started() {
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: new URL("./", self.location.href).href }),
    fetch("napkinmath.tar.bz2").then((response) => { if (!response.ok) throw new Error(`napkinmath.tar.bz2: ${response.status}`); return response.arrayBuffer(); }),
  ]);
  python.unpackArchive(archive, "bztar", { extractDir: "/napkinmath" });
  return python.runPython("import sys; sys.path.insert(0, '/napkinmath'); from napkinmath.serving.in_browser import reply; reply");
}

const ready = started();
ready.catch((error) => self.postMessage({ broken: String(error.message || error).trim().split("\n").pop() }));
self.onmessage = async ({ data }) => {
  const reply = await ready;
  const made = reply(data.path, data.body);
  const [status, text] = made.toJs();
  made.destroy();
  self.postMessage({ status, text });
};
