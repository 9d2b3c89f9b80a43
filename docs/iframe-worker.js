// The site's search runs in a worker, which browsers refuse to a page that was opened from a file.
// There a hidden frame takes the worker's place; elsewhere nothing changes.
if (location.protocol === "file:") {
  const loaded = (page, url) =>
    new Promise((resolve, reject) => {
      const script = page.createElement("script");
      Object.assign(script, { src: url, onload: resolve, onerror: reject });
      page.body.append(script);
    });
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write("<!doctype html><title>worker</title><body></body>");
      page.close();
      this.scope = this.frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => loaded(page, each)), Promise.resolve());
      this.ready = loaded(page, url);
    }
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
