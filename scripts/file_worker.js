// A browser lets no page that was opened from a file start a Worker, and search runs in one. Here a Worker is a hidden frame:
// its script runs there, and messages go to and fro as between a page and a Worker. Used only for pages opened from files.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => setTimeout(() => this.receive(data));
      this.inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
      this.load(url).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(url, document.baseURI).href;
        script.onload = done;
        script.onerror = failed;
        this.inside.document.body.appendChild(script);
      });
    }
    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    postMessage(data) {
      if (this.ready) this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
