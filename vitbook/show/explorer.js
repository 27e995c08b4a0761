// The attention explorer's one ES module: the same in a live notebook and on a finished page. Fetches nothing.

const INFERNO = "000004 1b0c41 4a0c6b 781c6d a52c60 cf4446 ed6925 fb9b06 f7d13d fcffa4"
  .split(" ")
  .map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

// Every colour is stated: the page around may be light or dark.
const STYLE = `
.vx { background: #fbfaf7; color: #2b2b2b; border-radius: 10px; padding: 14px 16px; box-sizing: border-box;
      font: 14px/1.4 system-ui, sans-serif; font-variant-numeric: tabular-nums; text-align: left; }
.vx * { box-sizing: border-box; }
.vx-bar { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; margin-bottom: 12px; }
.vx-images { display: flex; flex-wrap: wrap; gap: 6px; }
.vx button { font: inherit; color: inherit; background: #fff; border: 2px solid #d8d4ca; border-radius: 6px;
      padding: 2px; margin: 0; cursor: pointer; }
.vx button:hover { border-color: #8a867c; }
.vx button[aria-pressed="true"] { border-color: #0072b2; box-shadow: 0 0 0 1px #0072b2; }
.vx :focus-visible { outline: 3px solid #0072b2; outline-offset: 2px; }
.vx button.vx-cls { padding: 3px 12px; }
.vx canvas { display: block; width: 100%; border-radius: 3px; image-rendering: pixelated; }
.vx-images canvas { width: 44px; }
.vx label { display: flex; gap: 8px; align-items: center; color: inherit; }
.vx input { width: 130px; margin: 0; accent-color: #0072b2; }
.vx-models { display: flex; flex-wrap: wrap; gap: 16px 24px; }
.vx-model { flex: 1 1 260px; max-width: 372px; min-width: 0; }
.vx-model header { display: flex; justify-content: space-between; gap: 10px; margin-bottom: 4px; font-weight: 600; }
.vx-model header span { font-weight: 400; }
.vx canvas.vx-map { cursor: crosshair; touch-action: manipulation; }
.vx-heads { display: grid; grid-template-columns: repeat(auto-fill, minmax(62px, 1fr)); gap: 6px; margin-top: 8px; }
.vx-heads small { display: block; font-size: 11px; line-height: 1.35; text-align: center; }
.vx-status { margin: 12px 0 0; }
.vx-status div { min-height: 1.4em; }
.vx-hint { margin: 8px 0 0; font-size: 12px; color: #5f5b52; }
`;

// Saved state arrives as a DataView on a page, from a kernel as a DataView, a Uint8Array or an ArrayBuffer.
function bytesOf(data) {
  return ArrayBuffer.isView(data)
    ? new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
    : new Uint8Array(data);
}

async function unpack(data, spec) {
  const stream = new Blob([bytesOf(data)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const [count, height, width] = spec.images;
  const places = spec.grid[0] * spec.grid[1];
  const rows = spec.models.length * count * spec.layers * spec.heads * (spec.prefix + places);
  const peaks = new Float32Array(buffer, 0, rows);
  const others = new Float32Array(buffer, 4 * rows, rows * spec.prefix);
  const levels = new Uint8Array(buffer, 4 * rows * (1 + spec.prefix), rows * places);
  const pixels = new Uint8Array(buffer, levels.byteOffset + levels.length, count * height * width * 3);
  return { peaks, others, levels, pixels };
}

// True probabilities of one query's row, of one head or averaged over heads (head -1).
function lookAt(spec, stored, model, { image, layer, head, query }) {
  const places = spec.grid[0] * spec.grid[1];
  const tokens = spec.prefix + places;
  const heads = head < 0 ? [...Array(spec.heads).keys()] : [head];
  const patches = new Float64Array(places);
  const others = new Float64Array(spec.prefix);
  for (const one of heads) {
    const row = (((model * spec.images[0] + image) * spec.layers + layer) * spec.heads + one) * tokens + query;
    const unit = stored.peaks[row] / 255 ** 2 / heads.length; // levels are square roots
    for (let place = 0; place < places; place++) patches[place] += unit * stored.levels[row * places + place] ** 2;
    for (let other = 0; other < spec.prefix; other++) {
      others[other] += stored.others[row * spec.prefix + other] / heads.length;
    }
  }
  let at = 0;
  for (let place = 1; place < places; place++) if (patches[place] > patches[at]) at = place;
  return { patches, others, at, peak: patches[at] };
}

const place = (spec, query) => [Math.floor((query - spec.prefix) / spec.grid[1]), (query - spec.prefix) % spec.grid[1]];
const tokenName = (spec, query) =>
  query < spec.prefix ? (query ? `register ${query}` : "CLS") : `patch (${place(spec, query).join(",")})`;
const headName = (head) => (head < 0 ? "head mean" : `head ${head}`);
const short = (value) => value.toFixed(value >= 0.1 ? 2 : value >= 0.01 ? 3 : 4);

function describe(spec, seen, query) {
  const parts = [`maximum ${short(seen.peak)} at ${tokenName(spec, spec.prefix + seen.at)}`];
  if (query >= spec.prefix) {
    const [row, col] = place(spec, query);
    let near = 0;
    for (let r = Math.max(row - 1, 0); r <= Math.min(row + 1, spec.grid[0] - 1); r++) {
      for (let c = Math.max(col - 1, 0); c <= Math.min(col + 1, spec.grid[1] - 1); c++)
        near += seen.patches[r * spec.grid[1] + c];
    }
    const self = seen.patches[query - spec.prefix];
    parts.push(`self ${short(self)}`, `neighbours ${short(Math.max(near - self, 0))}`);
  }
  if (spec.prefix) parts.push(`CLS ${short(seen.others[0])}`);
  return parts.join(", ");
}

// One image as a canvas; the maps are drawn over the grey one, so that every hue on them is attention.
function photograph(spec, stored, image, grey) {
  const [, height, width] = spec.images;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  const picture = context.createImageData(width, height);
  for (let pixel = 0; pixel < width * height; pixel++) {
    const start = (image * width * height + pixel) * 3;
    const [red, green, blue] = stored.pixels.subarray(start, start + 3);
    const light = 0.3 * red + 0.59 * green + 0.11 * blue;
    picture.data.set(grey ? [light, light, light, 255] : [red, green, blue, 255], pixel * 4);
  }
  context.putImageData(picture, 0, 0);
  return canvas;
}

function colour(share) {
  const position = share * (INFERNO.length - 1);
  const low = Math.min(Math.floor(position), INFERNO.length - 2);
  return INFERNO[low].map((from, channel) => Math.round(from + (INFERNO[low + 1][channel] - from) * (position - low)));
}

// The map over the image: dark where nothing is looked at, glowing at the map's own maximum.
function paint(canvas, spec, photo, seen, query) {
  const [rows, cols] = spec.grid;
  const context = canvas.getContext("2d");
  const edge = (step, steps, size) => Math.round((step * size) / steps);
  context.imageSmoothingEnabled = false;
  context.drawImage(photo, 0, 0, canvas.width, canvas.height);
  seen.patches.forEach((weight, index) => {
    const [row, col] = [Math.floor(index / cols), index % cols];
    const share = seen.peak > 0 ? weight / seen.peak : 0;
    const [x, y] = [edge(col, cols, canvas.width), edge(row, rows, canvas.height)];
    context.fillStyle = `rgba(${colour(share).join(",")}, ${0.5 + 0.35 * share})`;
    context.fillRect(x, y, edge(col + 1, cols, canvas.width) - x, edge(row + 1, rows, canvas.height) - y);
  });
  if (query < spec.prefix) return;
  const [row, col] = place(spec, query);
  const [x, y] = [edge(col, cols, canvas.width), edge(row, rows, canvas.height)];
  const line = Math.max(canvas.width / 200, 1);
  for (const [stroke, inset] of [
    ["#000", 0.5],
    ["#fff", 1.5],
  ]) {
    context.strokeStyle = stroke;
    context.lineWidth = line;
    context.strokeRect(
      x + inset * line,
      y + inset * line,
      canvas.width / cols - 2 * inset * line,
      canvas.height / rows - 2 * inset * line,
    );
  }
}

function make(tag, properties = {}, ...children) {
  const { aria, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(aria ?? {}))
    element.setAttribute(name === "role" ? name : `aria-${name}`, value);
  element.append(...children);
  return element;
}

function sized(spec, width, properties = {}) {
  const [, imageHeight, imageWidth] = spec.images;
  return make("canvas", { width, height: Math.round((width * imageHeight) / imageWidth), ...properties });
}

async function render({ model, el }) {
  const spec = model.get("spec");
  let stored;
  try {
    stored = await unpack(model.get("data"), spec);
  } catch (error) {
    el.append(
      make(
        "p",
        {},
        `The attention explorer could not unpack its maps (${error.message}). It needs a browser of 2023 or later.`,
      ),
    );
    return undefined;
  }
  const photos = [...Array(spec.images[0]).keys()].map((image) => photograph(spec, stored, image, false));
  const greys = photos.map((_, image) => photograph(spec, stored, image, true));
  const labels = photos.map((_, image) => spec.labels[image] ?? `image ${image}`);
  let hovered = null; // a patch under the pointer is looked at, a chosen one is kept

  const chosen = () => ({
    image: model.get("image"),
    layer: model.get("layer"),
    head: model.get("head"),
    query: hovered ?? model.get("query"),
  });
  const choose = (name, value) => {
    hovered = null;
    if (model.get(name) === value) return draw();
    model.set(name, value); // its change event draws
    model.save_changes();
  };
  const hover = (query) => {
    if (query === hovered) return;
    hovered = query;
    draw();
  };

  const thumbnails = photos.map((photo, image) =>
    make(
      "button",
      { type: "button", title: labels[image], onclick: () => choose("image", image), aria: { label: labels[image] } },
      photo,
    ),
  );
  const slider = make("input", {
    type: "range",
    min: 0,
    max: spec.layers - 1,
    step: 1,
    oninput: (event) => choose("layer", Number(event.target.value)),
  });
  const layerText = make("span");
  const cls = make("button", { type: "button", className: "vx-cls", onclick: () => choose("query", 0) }, "query: CLS");
  const bar = make(
    "div",
    { className: "vx-bar" },
    make("div", { className: "vx-images", aria: { role: "group", label: "image" } }, ...thumbnails),
    make("label", {}, layerText, slider),
    ...(spec.prefix ? [cls] : []),
  );

  const panels = spec.models.map((name) => {
    const canvas = sized(spec, 480, {
      className: "vx-map",
      tabIndex: 0,
      aria: { role: "application", roledescription: "attention map" },
    });
    const patchAt = (event) => {
      const box = canvas.getBoundingClientRect();
      const step = (offset, size, steps) => Math.min(Math.max(Math.floor((offset / size) * steps), 0), steps - 1);
      const row = step(event.clientY - box.top, box.height, spec.grid[0]);
      return spec.prefix + row * spec.grid[1] + step(event.clientX - box.left, box.width, spec.grid[1]);
    };
    // A finger has no hover: it chooses by tapping, and drags the page as usual.
    canvas.onpointermove = (event) => event.pointerType !== "touch" && hover(patchAt(event));
    canvas.onpointerleave = () => hover(null);
    canvas.onclick = (event) => choose("query", patchAt(event));
    canvas.onkeydown = (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return; // the browser's own
      const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[
        event.key
      ] ?? [0, 0];
      const toCls = spec.prefix > 0 && event.key.toLowerCase() === "c";
      if (!down && !right && !toCls) return;
      event.preventDefault();
      event.stopPropagation(); // notebooks and page themes use the same keys
      const kept = model.get("query");
      if (toCls) return choose("query", 0);
      if (kept < spec.prefix) return choose("query", spec.prefix);
      const [row, col] = place(spec, kept);
      const inside = (value, size) => Math.min(Math.max(value, 0), size - 1);
      choose(
        "query",
        spec.prefix + inside(row + down, spec.grid[0]) * spec.grid[1] + inside(col + right, spec.grid[1]),
      );
    };
    const heads = [-1, ...Array(spec.heads).keys()].map((head) => {
      const [small, text] = [sized(spec, 96), make("small")];
      const button = make(
        "button",
        { type: "button", onclick: () => choose("head", head) },
        small,
        make("small", {}, head < 0 ? "mean" : headName(head)),
        text,
      );
      return { head, small, text, button };
    });
    const peak = make("span");
    const line = make("div");
    const root = make(
      "section",
      { className: "vx-model", aria: { label: name } },
      make("header", {}, name, peak),
      canvas,
      make(
        "div",
        { className: "vx-heads", aria: { role: "group", label: `heads of ${name}` } },
        ...heads.map(({ button }) => button),
      ),
    );
    return { name, canvas, heads, peak, line, root };
  });
  const where = make("div");
  const status = make(
    "div",
    { className: "vx-status", aria: { role: "status", live: "polite" } },
    where,
    ...panels.map(({ line }) => line),
  );
  const keys = spec.prefix ? "arrow keys move the patch, c chooses CLS" : "arrow keys move the patch";
  const hint = make(
    "p",
    { className: "vx-hint" },
    `Point at a patch to see where it looks; click or tap to keep it. With a map in focus, ${keys}. ` +
      "Every map is scaled to its own maximum, printed with it.",
  );

  function draw() {
    const now = chosen();
    thumbnails.forEach((button, image) => button.setAttribute("aria-pressed", image === now.image));
    cls.setAttribute("aria-pressed", now.query === 0 && spec.prefix > 0);
    slider.value = now.layer;
    layerText.textContent = `layer ${now.layer} (0 to ${spec.layers - 1})`;
    const title = `layer ${now.layer}, ${headName(now.head)}, ${tokenName(spec, now.query)}`;
    where.textContent = `${labels[now.image]}: ${title}`;
    panels.forEach(({ name, canvas, heads, peak, line }, index) => {
      const seen = lookAt(spec, stored, index, now);
      paint(canvas, spec, greys[now.image], seen, now.query);
      canvas.setAttribute("aria-label", `${name}, ${title}; ${keys}`);
      peak.textContent = `maximum ${short(seen.peak)}`;
      line.textContent = `${panels.length > 1 ? `${name}: ` : ""}${describe(spec, seen, now.query)}`;
      for (const { head, small, text, button } of heads) {
        const look = lookAt(spec, stored, index, { ...now, head });
        paint(small, spec, greys[now.image], look, now.query);
        text.textContent = short(look.peak);
        button.setAttribute("aria-pressed", head === now.head);
        button.setAttribute("aria-label", `${headName(head)}, maximum ${short(look.peak)}`);
      }
    });
  }

  const root = make(
    "div",
    { className: "vx", aria: { role: "group", label: "attention explorer" } },
    make("style", {}, STYLE),
    bar,
    make("div", { className: "vx-models" }, ...panels.map((panel) => panel.root)),
    status,
    hint,
  );
  root.style.maxWidth = `${8 + 396 * Math.min(panels.length, 2)}px`;
  el.append(root);
  draw();
  const choices = ["image", "layer", "head", "query"].map((name) => `change:${name}`);
  choices.forEach((choice) => model.on(choice, draw));
  return () => choices.forEach((choice) => model.off(choice, draw));
}

export default { render };
