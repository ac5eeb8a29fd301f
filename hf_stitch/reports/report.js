"use strict";
(function () {
  const sections = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const shown = [];

  // All heat maps of a section, to show all values of a pair of layers.
  const heats = sections.flatMap((section) => section.figures.flatMap((figure) => figure.views.flatMap((view) =>
    view.traces.filter((trace) => trace.type === "heatmap").map((trace) => ({ networks: section.networks, trace: trace })))));

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
    const own = { margin: { t: 40, r: 10 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 } };
    Object.assign(own, layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: { color: text, family: "system-ui, sans-serif" } });
    Object.keys(own).filter((key) => /^[xy]axis/.test(key)).forEach((key) => {
      own[key] = Object.assign({ gridcolor: line, zerolinecolor: line }, own[key]);
    });
    return own;
  }

  function maps(layout) {
    return Object.keys(layout).filter((key) => /^yaxis\d?$/.test(key) && key !== "yaxis9").length;
  }

  // On a phone, heat maps side by side are stacked, without room for remarks.
  function narrowed(layout) {
    const count = maps(layout);
    if (count === 1) return Object.assign({}, layout, { annotations: [] });
    const own = Object.assign({}, layout, { height: layout.height * count });
    for (let i = 0; i < count; i += 1) {
      const number = i === 0 ? "" : String(i + 1), top = 1 - i / count;
      own["xaxis" + number] = Object.assign({}, layout["xaxis" + number], { domain: [0, 1] });
      own["yaxis" + number] = Object.assign({}, layout["yaxis" + number], { domain: [top - 0.8 / count, top - 0.22 / count], showticklabels: true });
    }
    return own;
  }

  function stacked(traces, count) {
    let i = 0;
    return count === 1 ? traces : traces.map((trace) => trace.type !== "heatmap" ? trace : Object.assign({}, trace, {
      colorbar: Object.assign({}, trace.colorbar, { x: 0.5, len: 1, y: 1 - i++ / count - 0.2 / count }) }));
  }

  function draw(place, traces, layout) {
    const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
    const narrow = place.clientWidth < 600 && traces.some((trace) => trace.type === "heatmap");
    return Plotly.react(place, narrow ? stacked(traces, maps(layout)) : traces, themed(narrow ? narrowed(layout) : layout), options);
  }

  function plain(text) {
    return text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  }

  function fill(select, names) {
    names.forEach((name, place) => select.add(new Option(plain(name), String(place))));
  }

  function known(networks, row, column) {
    const found = new Map();
    heats.filter((each) => each.networks === networks).forEach(({ trace }) => {
      const i = trace.y.indexOf(row), j = trace.x.indexOf(column);
      if (i >= 0 && j >= 0 && trace.z[i][j] !== null) found.set(plain(trace.name), trace.z[i][j].toPrecision(4));
    });
    return [...found].map(([name, value]) => name + " " + value).join(", ");
  }

  function profiles(figure, networks, heat, start) {
    const row = figure.querySelector("select.row"), column = figure.querySelector("select.column");
    const place = figure.querySelector(".profile"), cell = figure.querySelector(".cell");
    const first = heat();
    fill(row, first.y);
    fill(column, first.x);
    row.value = String(start[0]);
    column.value = String(start[1]);
    function show() {
      const i = Number(row.value), j = Number(column.value), now = heat();
      const line = (x, y, name, axes) => Object.assign(
        { type: "scatter", mode: "lines+markers", x: x, y: y, name: name, hovertemplate: "%{x}: %{y:.4f}<extra></extra>" }, axes);
      const narrow = place.clientWidth < 600, axis = { automargin: true, type: "category" };
      cell.textContent = plain(now.y[i]) + " \u2192 " + plain(now.x[j]) + ": " +
        (known(networks, now.y[i], now.x[j]) || "undefined");
      draw(place, [
        line(now.x, now.z[i], "row " + now.y[i], { marker: { color: "#0072b2" } }),
        line(now.y, now.z.map((values) => values[j]), "column " + now.x[j],
          { xaxis: "x2", yaxis: "y2", marker: { color: "#d55e00" } }),
      ], { height: narrow ? 560 : 360, margin: { t: 60, r: 10 },
           xaxis: Object.assign({ domain: narrow ? [0, 1] : [0, 0.45] }, axis),
           xaxis2: Object.assign({ domain: narrow ? [0, 1] : [0.55, 1], anchor: "y2" }, axis),
           yaxis: { automargin: true, domain: narrow ? [0.64, 1] : [0, 1] },
           yaxis2: { automargin: true, domain: narrow ? [0, 0.36] : [0, 1], anchor: "x2", matches: "y" } });
    }
    row.addEventListener("change", show);
    column.addEventListener("change", show);
    figure.querySelector(".plot").on("plotly_click", (event) => {
      const point = event.points.find((each) => each.data.type === "heatmap");
      if (!point) return;
      row.value = String(first.y.indexOf(point.y));
      column.value = String(first.x.indexOf(point.x));
      show();
    });
    shown.push(show);
    show();
    return show;
  }

  document.querySelectorAll("figure[data-figure]").forEach((figure) => {
    const place = figure.querySelector(".plot"), section = sections[Number(figure.dataset.section)];
    const own = section.figures[Number(figure.dataset.figure)];
    const choice = figure.querySelector(".view"), whole = figure.querySelector(".whole");
    const view = () => own.views[choice ? Number(choice.value) : 0];
    const heat = () => view().traces.find((trace) => trace.type === "heatmap");
    const widened = (trace) => whole.checked && "meta" in trace ? Object.assign({}, trace, { zmin: trace.meta[0], zmax: trace.meta[1] }) : trace;
    let profile = null;
    function show() {
      figure.querySelector("figcaption").textContent = view().caption;
      place.setAttribute("aria-label", view().caption);
      const output = figure.querySelector("output");
      if (output) output.textContent = view().label;
      return draw(place, view().traces.map(widened), own.layout);
    }
    const changed = () => { show(); if (profile) profile(); };
    whole.parentElement.hidden = !own.views.some((each) => each.traces.some((trace) => "meta" in trace));
    whole.addEventListener("change", changed);
    if (choice) choice.addEventListener("input", changed);
    shown.push(show);
    show().then(() => {
      if ("profiles" in figure.dataset) profile = profiles(figure, section.networks, heat, own.start);
      figure.dataset.ready = "";
    });
  });
  dark.addEventListener("change", () => shown.forEach((show) => show()));
})();
