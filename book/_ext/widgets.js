// Prepares a page for widgets: all they need lies beside this file, however deep the page, served or opened as a file.
{
  const here = new URL(".", document.currentScript.src).href;
  requirejs.config({
    paths: {
      anywidget: `${here}anywidget`,
      "@jupyter-widgets/html-manager/dist": here.slice(0, -1), // where its style sheet looks for fonts
    },
  });
  // Labels of widgets ask for MathJax 2 by its old name; the page has MathJax 3.
  window.addEventListener("load", () => {
    if (window.MathJax && !window.MathJax.Hub) {
      window.MathJax.Hub = { Queue: ([, , element]) => window.MathJax.typesetPromise([element]) };
    }
  });
}
