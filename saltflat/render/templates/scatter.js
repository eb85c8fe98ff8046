// The large scatter plot: a run is a mark, and pointing, tapping or walking to it with arrow keys tells all about it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const svg = byId("scatter"), tip = byId("tip"), plot = svg.parentElement;
  const choice = { measure: byId("measure"), gap: byId("gap"), color: byId("color") };
  const SHAPES = ["M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z", "M-4.4-4.4h8.8v8.8h-8.8z", "M0-6.2L5.6 4.2H-5.6z", "M0-6L6 0 0 6-6 0z", "M0 6.2L5.6-4.2H-5.6z", "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z", "M-3-5.2h6l3 5.2-3 5.2h-6l-3-5.2z"];
  const BINS = 7, NEAR = 28, MARGIN = { left: 62, right: 14, top: 14, bottom: 48 };

  const element = (name, attributes, parent, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const html = (name, text, parent) => {
    const made = document.createElement(name);
    made.textContent = text;
    parent.append(made);
    return made;
  };
  const told = (value) => {
    if (value === null || value === undefined) return "undefined";
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace("e+", "e") : String(Number(value.toPrecision(4)));
  };
  const option = (select, value, text, parent) => {
    const made = html("option", text, parent ?? select);
    made.value = value;
  };

  const groups = new Map();
  const scored = new Set(data.controls);
  data.measures.forEach((each, index) => {
    const label = scored.has(each.name) ? "Controls" : "Measures";
    if (!groups.has(label)) {
      const made = document.createElement("optgroup");
      made.label = label;
      choice.measure.append(made);
      groups.set(label, made);
    }
    option(choice.measure, index, each.name, groups.get(label));
  });
  option(choice.color, "", "one color");
  data.settings.forEach((each, index) => option(choice.color, index, each.name));
  choice.color.value = data.settings.length ? "0" : "";
  choice.measure.value = String(data.first ?? 0);

  // By run: a color (a name of the style sheet) and a shape.
  const looks = () => {
    const setting = choice.color.value === "" ? null : data.settings[Number(choice.color.value)];
    if (!setting) return { of: () => ({ color: "--c0", shape: 0 }), legend: [] };
    if (setting.levels.length <= BINS) {
      const of = (run) => ({ color: `--c${setting.of[run]}`, shape: setting.of[run] });
      return { of, legend: setting.levels.map((text, level) => ({ text, color: `--c${level}`, shape: level })), name: setting.name };
    }
    // Numbers far apart are binned by their logarithms, others evenly, texts by their order.
    let places = setting.numbers ?? setting.levels.map((_, level) => level);
    const low = Math.min(...places), high = Math.max(...places);
    if (setting.numbers && low > 0 && high / low > 100) places = places.map(Math.log);
    const least = Math.min(...places), span = Math.max(...places) - least || 1;
    const bin = (level) => Math.min(BINS - 1, Math.floor(((places[level] - least) / span) * BINS));
    return { of: (run) => ({ color: `--q${bin(setting.of[run])}`, shape: 0 }), ramp: [setting.levels[0], setting.levels.at(-1)], legend: [], name: setting.name };
  };

  const nice = (low, high, count) => {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999) ?? raw;
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9 && ticks.length < 50; k++) ticks.push(k * step);
    return ticks;
  };
  const logTicks = (low, high, count) => {
    const from = Math.floor(low), to = Math.ceil(high), ticks = [];
    const within = (each) => each >= low - 1e-9 && each <= high + 1e-9;
    const every = Math.max(1, Math.ceil((to - from) / count));
    for (let decade = from; decade <= to; decade += every) {
      for (const part of high - low < 1.5 ? [1, 2, 5] : [1]) {
        const at = decade + Math.log10(part);
        if (within(at)) ticks.push(at);
      }
    }
    return ticks.length > 1 ? ticks : nice(low, high, count);
  };
  const axisOf = (values, log) => {
    let low = Math.min(...values), high = Math.max(...values);
    if (low === high) [low, high] = log || low === 0 ? [low - 1, high + 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
    const pad = (high - low) * 0.05;
    return [low - pad, high + pad];
  };

  let marks = [], current = -1, pinned = false;

  const hide = () => {
    tip.hidden = true;
    marks[current]?.node.classList.remove("on");
    current = -1;
    pinned = false;
  };

  const facts = (run) => {
    const measure = data.measures[Number(choice.measure.value)], error = measure.errors?.[run];
    const value = told(measure.values[run]) + (error ? ` ± ${told(error)}` : "");
    const found = [[measure.name, value], ...Object.entries(data.gaps).map(([gap, each]) => [`gap in ${gap}`, told(each[run])])];
    for (const each of data.settings) found.push([each.name, each.levels[each.of[run]]]);
    for (const [name, each] of Object.entries(data.outcomes)) found.push([name.replace("_", " "), told(each[run])]);
    if (data.status[run] !== "done") found.push(["status", data.status[run]]);
    return found;
  };

  const show = (index, announce) => {
    if (current !== index) marks[current]?.node.classList.remove("on");
    current = index;
    const { run, x, y, node } = marks[index];
    node.classList.add("on");
    tip.replaceChildren();
    html("strong", `Run ${data.keys[run]}`, tip);
    const list = document.createElement("dl");
    for (const [name, value] of facts(run)) {
      html("dt", name, list);
      html("dd", value, list);
    }
    tip.append(list);
    tip.setAttribute("aria-live", announce ? "polite" : "off");
    tip.hidden = false;
    const width = plot.clientWidth, height = plot.clientHeight;
    const left = x + 14 + tip.offsetWidth <= width ? x + 14 : x - 14 - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(left, width - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, Math.min(y - tip.offsetHeight / 2, height - tip.offsetHeight))}px`;
  };

  const drawLegend = (look, hollow) => {
    const legend = byId("legend");
    legend.replaceChildren();
    if (look.name) html("strong", look.name, legend);
    const entry = (text, shape, style) => {
      const holder = html("span", "", legend);
      const icon = element("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" }, holder);
      element("path", { d: SHAPES[shape], style }, icon);
      holder.append(text);
    };
    for (const each of look.legend) entry(each.text, each.shape, `fill:var(${each.color})`);
    if (look.ramp) {
      const holder = html("span", look.ramp[0], legend);
      const icon = element("svg", { viewBox: `0 0 ${BINS} 1`, preserveAspectRatio: "none", class: "ramp", "aria-hidden": "true" }, holder);
      for (let bin = 0; bin < BINS; bin++) element("rect", { x: bin, width: 1, height: 1, style: `fill:var(--q${bin})` }, icon);
      holder.append(look.ramp[1]);
    }
    if (hollow) entry("hollow: missed the stopping rule", 0, "fill:none;stroke:var(--muted);stroke-width:2");
  };

  const draw = () => {
    hide();
    svg.replaceChildren();
    const width = Math.max(280, plot.clientWidth), height = Math.max(240, svg.clientHeight);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const measure = data.measures[Number(choice.measure.value)], gap = choice.gap.value, gaps = data.gaps[gap];
    const log = document.querySelector("#scale input:checked").value === "log";
    const look = looks();
    const all = measure ? data.keys.map((_, run) => run) : [];
    const known = all.filter((run) => measure.values[run] !== null && gaps[run] !== null);
    const runs = known.filter((run) => !log || measure.values[run] > 0);
    const lost = all.length - known.length, below = known.length - runs.length;
    byId("left").textContent = [
      lost && `${lost} of ${all.length} runs are not drawn: they have no value or no gap.`,
      below && `${below} more are not drawn: their values are not positive, and the axis is logarithmic.`,
    ].filter(Boolean).join(" ");
    drawLegend(look, runs.some((run) => data.status[run] === "missed"));
    marks = [];
    if (!runs.length) {
      element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg, "There is no run to draw.");
      return;
    }
    const place = (value) => (log ? Math.log10(value) : value);
    const across = axisOf(runs.map((run) => place(measure.values[run])), log), up = axisOf(runs.map((run) => gaps[run]), false);
    const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const atX = (value) => MARGIN.left + ((value - across[0]) / (across[1] - across[0])) * inner.width;
    const atY = (value) => MARGIN.top + (1 - (value - up[0]) / (up[1] - up[0])) * inner.height;
    const bottom = MARGIN.top + inner.height, right = MARGIN.left + inner.width;
    const count = Math.max(3, Math.round(inner.width / 110));
    for (const tick of log ? logTicks(...across, count) : nice(...across, count)) {
      element("path", { class: "grid", d: `M${atX(tick)} ${MARGIN.top}V${bottom}` }, svg);
      element("text", { x: atX(tick), y: bottom + 17, "text-anchor": "middle" }, svg, told(log ? 10 ** tick : tick));
    }
    for (const tick of nice(...up, 5)) {
      element("path", { class: "grid", d: `M${MARGIN.left} ${atY(tick)}H${right}` }, svg);
      element("text", { x: MARGIN.left - 7, y: atY(tick) + 4, "text-anchor": "end" }, svg, told(tick));
    }
    element("path", { class: "frame", d: `M${MARGIN.left} ${MARGIN.top}V${bottom}H${right}` }, svg);
    const title = measure.name.length > 60 ? `${measure.name.slice(0, 57)}...` : measure.name;
    element("text", { class: "title", x: MARGIN.left + inner.width / 2, y: height - 8, "text-anchor": "middle" }, svg, title + (log ? " (log)" : ""));
    element("text", { class: "title", x: -(MARGIN.top + inner.height / 2), y: 13, transform: "rotate(-90)", "text-anchor": "middle" }, svg, `gap in ${gap}`);
    for (const run of runs) {
      const { color, shape } = look.of(run), x = atX(place(measure.values[run])), y = atY(gaps[run]), error = measure.errors?.[run];
      if (error) {
        const ends = [-1, 1].map((side) => measure.values[run] + side * 1.96 * error).map((end) => (log && end <= 0 ? MARGIN.left : atX(place(end))));
        const [from, to] = ends.map((end) => Math.max(MARGIN.left, Math.min(right, end)));
        element("path", { class: "whiskers", d: `M${from} ${y}H${to}`, style: `stroke:var(${color})` }, svg);
      }
      marks.push({ run, x, y, color, shape });
    }
    // In the order in which arrow keys walk: from left to right.
    marks.sort((one, other) => one.x - other.x || one.y - other.y);
    marks.forEach((mark, index) => {
      const hollow = data.status[mark.run] === "missed";
      const style = hollow ? `stroke:var(${mark.color})` : `fill:var(${mark.color})`;
      const label = `Run ${data.keys[mark.run]}: ${facts(mark.run).map(([name, value]) => `${name} ${value}`).join(", ")}`;
      mark.node = element("path", { class: hollow ? "run hollow" : "run", d: SHAPES[mark.shape], style, transform: `translate(${mark.x} ${mark.y})`, tabindex: index ? -1 : 0, role: "img", "aria-label": label, "data-run": mark.run }, svg);
      mark.node.addEventListener("focus", () => show(index, false));
      mark.node.addEventListener("blur", () => pinned || hide());
    });
  };

  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    let best = -1, distance = NEAR;
    marks.forEach(({ x, y }, index) => {
      const away = Math.hypot(event.clientX - box.left - x, event.clientY - box.top - y);
      if (away < distance) [best, distance] = [index, away];
    });
    return best;
  };
  svg.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch" || pinned) return;
    const index = nearest(event);
    if (index < 0) hide();
    else if (index !== current) show(index, true);
  });
  svg.addEventListener("pointerleave", (event) => event.pointerType === "touch" || pinned || hide());
  svg.addEventListener("click", (event) => {
    const index = nearest(event);
    if (index < 0 || (pinned && index === current)) return hide();
    show(index, true);
    pinned = true;
  });
  svg.addEventListener("keydown", (event) => {
    const at = marks.findIndex(({ node }) => node === document.activeElement);
    if (event.key === "Escape") return hide();
    const next = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, Home: 0, End: marks.length - 1 }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    const to = Math.max(0, Math.min(marks.length - 1, next));
    marks[at].node.setAttribute("tabindex", "-1");
    marks[to].node.setAttribute("tabindex", "0");
    marks[to].node.focus();
  });
  document.addEventListener("pointerdown", (event) => svg.contains(event.target) || hide());

  const buttons = [...document.querySelectorAll(".small-plot")];
  const chooseMeasure = (index) => {
    choice.measure.value = String(index);
    const values = (data.measures[index]?.values ?? []).filter((value) => value !== null);
    const wide = values.length > 0 && Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 100;
    document.querySelector(`#scale input[value=${wide ? "log" : "linear"}]`).checked = true;
    for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.measure === String(index)));
    draw();
  };
  for (const each of buttons) {
    each.addEventListener("click", () => {
      chooseMeasure(Number(each.dataset.measure));
      plot.scrollIntoView({ block: "nearest" });
    });
  }
  choice.measure.addEventListener("change", () => chooseMeasure(Number(choice.measure.value)));
  choice.color.addEventListener("change", draw);
  byId("scale").addEventListener("change", draw);
  document.addEventListener("gap", draw);
  let width = 0;
  new ResizeObserver(() => {
    if (plot.clientWidth === width) return;
    width = plot.clientWidth;
    draw();
  }).observe(plot);
  width = plot.clientWidth;
  chooseMeasure(data.first ?? 0);
})();
