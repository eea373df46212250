// Browsers start no worker from a page on a disk. There the search's worker runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      const inside = (this.inside = frame.contentWindow), page = inside.document;
      const load = (source) =>
        new Promise((done, failed) => {
          const script = page.createElement("script");
          Object.assign(script, { src: source, onload: done, onerror: () => failed(new Error(`cannot load ${source}`)) });
          page.head.appendChild(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
