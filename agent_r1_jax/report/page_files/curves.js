// The curves of a run, as SVG: thin lines as measured, thick ones averaged.

const SVG = 'http://www.w3.org/2000/svg';
const HEIGHT = 150,
  LEFT = 44,
  BOTTOM = 20,
  TOP = 8,
  RIGHT = 8;
// The charts that come first, by the name in which '*' stands for the evaluation set.
const FIRST = [
  'rollout/reward',
  'eval/*/em',
  'eval/*/reward',
  'eval/*/f1',
  'train/kl',
  'train/entropy',
  'rollout/action_tokens',
  'rollout/turns',
  'rollout/tool_calls',
  'rollout/tool_errors',
  'rollout/dead_groups',
  'rollout/status',
  'train/grad_norm',
  'train/loss',
  'time',
];

/** Groups the metrics into charts: sets of one number, statuses, and times are together. */
function planCharts() {
  const charts = new Map();
  for (const name of Object.keys(run.metrics.series)) {
    const parts = name.split('/');
    let title = name,
      label = parts[parts.length - 1];
    if (parts[0] === 'eval' && parts.length > 2) {
      title = ['eval', '*', ...parts.slice(2)].join('/');
      label = parts[1];
    } else if (parts[0] === 'time' || parts[0] === 'alarm' || parts[1] === 'status') {
      title = parts.slice(0, -1).join('/');
    }
    if (!charts.has(title)) charts.set(title, []);
    charts.get(title).push({label, values: run.metrics.series[name]});
  }
  const rank = title => {
    const place = FIRST.indexOf(title);
    return place < 0 ? FIRST.length : place;
  };
  return [...charts]
    .map(([title, lines]) => ({title, lines}))
    .sort((a, b) => rank(a.title) - rank(b.title));
}

function isConstant(chart) {
  return chart.lines.every(line => {
    const found = line.values.filter(v => v !== null);
    return found.every(v => v === found[0]);
  });
}

/** Returns about n round numbers that lie in [low, high]. */
function ticks(low, high, n) {
  const raw = (high - low) / n || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * size).find(s => s >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

/** A centred mean over a twentieth of the points; windows shrink at the ends. */
function smooth(points) {
  const half = Math.floor(points.length / 40);
  return points.map(([x], i) => {
    const reach = Math.min(half, i, points.length - 1 - i);
    const window = points.slice(i - reach, i + reach + 1);
    return [x, window.reduce((sum, point) => sum + point[1], 0) / window.length];
  });
}

function svg(tag, attributes, parent) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  parent?.append(element);
  return element;
}

/** Draws a chart into an element of a known width; on paper it is scaled to fit. */
function draw(chart, box, width) {
  const {steps} = run.metrics;
  const lines = chart.lines.map(({label, values}) => ({
    label,
    points: values.map((v, i) => [steps[i], v]).filter(point => point[1] !== null),
  }));
  const all = lines.flatMap(line => line.points.map(point => point[1]));
  let low = Math.min(...all),
    high = Math.max(...all);
  if (low >= 0 && low < high / 3) low = 0;
  if (high === low) high = low + (Math.abs(low) || 1);
  const first = Math.min(...steps),
    last = Math.max(...steps, first + 1);
  const x = step => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
  const y = v => HEIGHT - BOTTOM - ((v - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const name = `${chart.title}, by step`;
  const viewBox = `0 0 ${width} ${HEIGHT}`;
  const root = svg('svg', {width, viewBox, role: 'img', 'aria-label': name});
  for (const v of ticks(low, high, 5)) {
    svg('line', {x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v), class: 'grid'}, root);
    const at = {x: LEFT - 6, y: y(v) + 3.5, class: 'tick', 'text-anchor': 'end'};
    svg('text', at, root).textContent = format(v);
  }
  for (const step of ticks(first, last, Math.min(6, width / 60))) {
    if (!Number.isInteger(step)) continue;
    const at = {x: x(step), y: HEIGHT - 5, class: 'tick', 'text-anchor': 'middle'};
    svg('text', at, root).textContent = format(step);
  }
  const path = points =>
    points
      .map(([s, v], i) => `${i ? 'L' : 'M'}${x(s).toFixed(1)} ${y(v).toFixed(1)}`)
      .join('');
  lines.forEach((line, i) => {
    const color = `var(--line-${i % 6})`;
    const thick = smooth(line.points);
    if (line.points.length >= 40) {
      svg('path', {d: path(line.points), stroke: color, class: 'thin'}, root);
    }
    svg('path', {d: path(thick), stroke: color, class: 'thick'}, root);
    if (line.points.length > 12) return;
    for (const [s, v] of line.points) {
      svg('circle', {cx: x(s), cy: y(v), r: 2.5, fill: color}, root);
    }
  });
  const cursor = svg('line', {y1: TOP, y2: HEIGHT - BOTTOM, class: 'cursor'}, root);
  box.replaceChildren(root);
  readOut(chart, box, lines, null);
  const known = lines.flatMap(line => line.points.map(point => point[0]));
  // The step with a number that is nearest to the pointer.
  const nearest = event => {
    const at = event.clientX - root.getBoundingClientRect().left;
    return known.reduce((a, b) => (Math.abs(x(b) - at) < Math.abs(x(a) - at) ? b : a));
  };
  root.onpointermove = event => {
    const step = nearest(event);
    cursor.setAttribute('x1', x(step));
    cursor.setAttribute('x2', x(step));
    cursor.style.visibility = 'visible';
    readOut(chart, box, lines, step);
  };
  root.onpointerleave = () => {
    cursor.style.visibility = 'hidden';
    readOut(chart, box, lines, null);
  };
  root.onclick = event => showStep(nearest(event));
}

/** Shows each line's name with its number at a step, or its last one. */
function readOut(chart, box, lines, step) {
  const items = lines.map((line, i) => {
    const item = make('span');
    const dot = make('i');
    dot.style.background = `var(--line-${i % 6})`;
    const point =
      step === null ? line.points.at(-1) : line.points.find(p => p[0] === step);
    const label = lines.length > 1 ? line.label : step === null ? 'last' : `step ${step}`;
    item.append(dot, `${label} `, make('b', '', format(point?.[1])));
    return item;
  });
  if (step !== null && lines.length > 1)
    items.unshift(make('span', 'quiet', `step ${step}`));
  box.previousSibling.replaceChildren(...items);
}

let planned = [];

function showCurves() {
  planned = planned.length ? planned : planCharts();
  const query = get('metric-search').value.toLowerCase();
  const shown = planned.filter(
    chart =>
      (get('constant').checked || !isConstant(chart)) &&
      (chart.title + chart.lines.map(line => line.label)).toLowerCase().includes(query),
  );
  const boxes = shown.map(() => make('div', 'plot'));
  get('curves').replaceChildren(
    ...shown.map((chart, i) => {
      const card = make('figure');
      card.append(make('figcaption', '', chart.title), make('p', 'legend'), boxes[i]);
      return card;
    }),
  );
  // All are drawn, also those out of view: the page may be printed. The widths are read
  // before anything is drawn, so that the browser computes the layout once.
  const widths = boxes.map(box => box.clientWidth);
  shown.forEach((chart, i) => draw(chart, boxes[i], widths[i]));
  if (!shown.length) get('curves').append(make('p', 'quiet', 'No metric has this name.'));
}

/** Names the score of a set with the number of its episodes. */
function nameScore(name, last) {
  const [, set, score] = name.split('/');
  const n = last(`eval/${set}/episodes`);
  return n ? `${set} ${score}, ${n} episodes` : `${set} ${score}`;
}

function showTiles() {
  const {steps, series} = run.metrics;
  const last = name => (series[name] ?? []).findLast(v => v !== null);
  const saved = Object.fromEntries(run.config);
  const seconds = ['rollout', 'update', 'eval']
    .flatMap(name => series[`time/${name}`] ?? [])
    .reduce((sum, v) => sum + v, 0);
  const evals = Object.keys(series).filter(n => /^eval\/.*\/em$/.test(n));
  const scores = evals.length
    ? evals
    : Object.keys(series).filter(n => /^eval\/.*\/reward$/.test(n));
  const tiles = [
    ['Step', `${format(steps.at(-1) ?? 0)} of ${saved['schedule.steps'] ?? '?'}`],
    ['Reward in training', format(last('rollout/reward'))],
    ...scores.map(n => [nameScore(n, last), format(last(n))]),
    ['Tool calls an episode', format(last('rollout/tool_calls'))],
    ['Entropy, nats a token', format(last('train/entropy'))],
    [
      'Time of the steps',
      seconds < 120 ? `${format(seconds)} s` : `${format(seconds / 60)} min`,
    ],
  ];
  get('tiles').replaceChildren(
    ...tiles.map(([name, value]) => {
      const tile = make('div');
      tile.append(make('b', '', value), make('span', '', name));
      return tile;
    }),
  );
}

function showConfig() {
  const rooms = new Map();
  for (const [name, value, changed] of run.config) {
    if (get('changed').checked && !changed) continue;
    const room = name.includes('.') ? name.split('.')[0] : 'run';
    if (!rooms.has(room)) rooms.set(room, make('table'));
    const row = make('tr', changed ? 'changed' : '');
    row.append(make('td', '', name.replace(`${room}.`, '')), make('td', '', value));
    rooms.get(room).append(row);
  }
  get('config').replaceChildren(
    ...[...rooms].map(([room, table]) => {
      table.createCaption().textContent = room;
      return table;
    }),
  );
}
