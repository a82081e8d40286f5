// Search runs in a worker, and browsers refuse workers for pages opened from files. There, a hidden
// frame stands in for the worker. The offline plugin would load such a script from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.ready = new Promise((resolve) => {
        window.addEventListener("message", (event) => {
          if (event.source === inside) {
            this.dispatchEvent(new MessageEvent("message", { data: event.data }));
          }
        });
        this.frame.addEventListener("load", resolve);
      });
      inside.document.open();
      inside.document.write(
        "<script>" +
          'postMessage = (data) => parent.postMessage(data, "*");' +
          "importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {" +
          'const script = document.createElement("script"); script.src = url; script.onload = done;' +
          "document.body.appendChild(script); })), Promise.resolve());" +
          "</" + "script>" +
          '<body><script src="' + url + '"></' + "script></body>"
      );
      inside.document.close();
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
