// RequireJS finds anywidget's script beside this file, however deep the page lies and whether served or opened as a file.
requirejs.config({ paths: { anywidget: new URL("anywidget", document.currentScript.src).href } });
