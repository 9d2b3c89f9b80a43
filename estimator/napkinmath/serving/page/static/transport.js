"use strict";
// How the page asks where there is no server: the same Python in two workers, one for moves and
// one for what takes longer, so that a move never waits behind a search.
const QUICK = ["/api/catalogue", "/api/estimate", "/api/command"];

class Lane {
  constructor() { this.owed = []; this.now = null; this.worker = null; this.broken = ""; }

  start() {
    try { this.worker = new Worker("worker.js", { type: "module" }); }
    catch (error) { this.fail(`this page cannot start Python here (${error.message}); serve the folder, for example with: python -m http.server`); return; }
    this.worker.onmessage = ({ data }) => {
      if (data.broken) return this.fail(`Python did not start: ${data.broken}`);
      const { resolve, reject } = this.now;
      this.now = null;
      const answer = JSON.parse(data.text);
      if (data.status === 200) resolve(answer); else reject(new Error(answer.error));
      this.next();
    };
    this.worker.onerror = () => this.fail("Python cannot start in this browser, or the folder is opened as a file; serve it, for example with: python -m http.server");
  }

  fail(reason) {
    this.broken = reason;
    for (const { reject } of [this.now, ...this.owed].filter(Boolean)) reject(new Error(reason));
    this.now = null;
    this.owed = [];
  }

  ask(path, body, signal) {
    return new Promise((resolve, reject) => {
      if (!this.worker && !this.broken) this.start();
      if (this.broken) return reject(new Error(this.broken));
      this.owed.push({ path, body: JSON.stringify(body), signal, resolve, reject });
      this.next();
    });
  }

  next() {
    while (!this.now && this.owed.length) {
      const asked = this.owed.shift();
      if (asked.signal && asked.signal.aborted) { asked.reject(new DOMException("superseded", "AbortError")); continue; }
      this.now = asked;
      this.worker.postMessage({ path: asked.path, body: asked.body });
    }
  }
}

const moves = new Lane(), searches = new Lane();
const transport = {
  async catalogue() {
    document.getElementById("verdict").textContent = "starting Python in this page\u2026";
    return moves.ask("/api/catalogue", {});
  },
  post(path, body, signal) { return (QUICK.includes(path) || path.startsWith("/api/export/") ? moves : searches).ask(path, body, signal); },
};
if ("serviceWorker" in navigator) navigator.serviceWorker.register("service_worker.js").catch(() => {}); // without it the page works too, while its host does
