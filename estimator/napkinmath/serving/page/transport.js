"use strict";
// How the page asks: here the server that it came from. static/transport.js asks the same of a
// worker in the browser.
const TRIES = 4; // where the server is busy
const transport = {
  async catalogue() { return (await fetch("/api/catalogue")).json(); },
  async post(path, body, signal, tries = TRIES) {
    const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
    const answer = await response.json();
    if (response.status === 503 && tries > 1) {
      const seconds = Number(response.headers.get("Retry-After")) || 1;
      await new Promise((resolve) => setTimeout(resolve, 1000 * seconds * (1 + Math.random()))); // not all at once
      if (!signal || !signal.aborted) return transport.post(path, body, signal, tries - 1);
    }
    if (!response.ok) throw new Error(answer.error);
    return answer;
  },
};
