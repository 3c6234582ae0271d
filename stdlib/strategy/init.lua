-- From `parallel = { ... }` to what the compiler is told. A strategy is a table of verbs, each of which may be missing; the library's own
-- are files of this form, and a script adds its own with strategies = { ... }. docs/parallelism.md shows each verb by an example.
--
--   name                     for messages
--   options                  rows of util.options: the keys of `parallel` that it reads
--   check(p)                 p: the checked options of all strategies; refuses what can't be honoured
--   axes(p)                  list of { name =, size = n or "auto", splits = "samples" or "stages" or nil }
--   place(g, p, mesh)        after the forward trace: g:place(name, { axis = "S(0)" }) says where parameters lie
--   recompute(g, p)          what backward makes again: { ops =, segments =, communication = }, or nil
--   buckets(parameters, p)   list of lists of names: which gradients travel together, first things first; nil: by size
--   keep(parameter, p)       nil (whole), or { states =, gradients =, parameters = lists of axes that share them, gather = "use" or
--                            "step", each = "micro" or "step" }
--   reduce(bucket, info, p)  traced: a partial sum over info.axes becomes the sum, or the rank's share of it; nil: the default
--   gather(share, info, p)   traced: a share of a bucket's parameters becomes the whole bucket; nil: the default
--   update(entry, g, p)      traced: what stands around the optimizer (update.lua); returns the new value
--   replicas(p)              "equal" (nil), "differ", or "alone": with other first values, each seeing every sample
--   between                  { every = function(p) -> steps or nil, declare = function(g, p) (in the training graph), trace = function(g, p) }:
--                            a plan of its own that runs after every so many steps
--   wire(p)                  how gradients travel by default: { bucket_mb =, first_bucket_mb =, dtype =, by_registration = }
--   pipeline(p, g, how)      what cuts the model into stages and orders them (pipeline.lua)
--   fit(p, how, make), fits(p)   make() traces and compiles a plan with what p says now; fit calls it until the plan fits
--   variants                 rows { key, { values, the plain one first } }: what `dtrain check --all` tries beside the library's own
local core = require "dtrain.core"
local util = require "dtrain.util"

local M = {}

local own = { "data", "zero", "local_sgd", "tensor", "pipeline", "recompute" }
local library = {}
for _, name in ipairs(own) do -- a file that is taken away takes its strategy with it, and no other
  local ok, s = pcall(require, "dtrain.strategy." .. name)
  if ok then library[#library + 1] = s
  elseif not tostring(s):find("module 'dtrain.strategy." .. name .. "' not found", 1, true) then error(s, 0) end
end

local form = { { "name", "string" }, { "options", "table" }, { "check", "function" }, { "axes", "function" },
  { "place", "function" }, { "recompute", "function" }, { "buckets", "function" }, { "keep", "function" },
  { "reduce", "function" }, { "gather", "function" }, { "update", "function" }, { "replicas", "function|string" },
  { "between", "table" }, { "wire", "function" }, { "fit", "function" }, { "fits", "function" }, { "variants", "table" } }

local Strategy = { __name = "strategy" }
Strategy.__index = Strategy

--- Checks `parallel` and returns what engine and trace ask: s.p (all options), s:mesh(ranks), s:localize(graph, where),
--- s:compile(options, mesh, graph, how), s:each(verb).
function M.new(given)
  local rows = { { "mesh", "table" }, { "strategies", "table", {} } }
  local list = table.move(library, 1, #library, 1, {})
  for i, s in ipairs(given.strategies or {}) do
    local label = ("dt.job: parallel: strategies[%d]"):format(i)
    list[#list + 1] = util.options(label, s, form)
    list[#list].name = s.name or ("strategies[%d]"):format(i)
    list[#list].scripts = true
  end
  local from = { mesh = "dtrain", strategies = "dtrain" }
  for _, s in ipairs(list) do
    for _, row in ipairs(s.options or {}) do
      if from[row[1]] then
        util.fail("dt.job: parallel: the option %s of strategy %s is %s's already; give it another name", row[1], s.name, from[row[1]])
      end
      from[row[1]] = s.name
      rows[#rows + 1] = row
    end
  end
  local self = setmetatable({ list = list, p = util.options("dt.job: parallel", given, rows) }, Strategy)
  for _, s in ipairs(list) do if s.check then s.check(self.p) end end
  return self
end

-- ---- the mesh ----
local roles = { stages = 1, samples = 2 } -- stages far apart, tensor parts close together

-- The axes that the strategies add, in the order of the mesh when the script says none; strategy of each by name.
local function axes_of(self)
  local list, by, auto = {}, {}, {}
  for _, s in ipairs(self.list) do
    for i, axis in ipairs(s.axes and s.axes(self.p) or {}) do
      local label = ("dt.job: parallel: axes of %s: axis %d"):format(s.name, i)
      local a = util.options(label, axis, { { "name", "string", required = true }, { "size", "count|string", required = true },
        { "splits", "string", choices = { "samples", "stages" } } })
      if type(a.size) == "string" and a.size ~= "auto" then
        util.fail("%s: size is a number of ranks or \"auto\", got %q", label, a.size)
      end
      if by[a.name] then
        util.fail("dt.job: parallel: the strategies %s and %s both add the axis %q; give one of them another name", by[a.name].name,
          s.name, a.name)
      end
      by[a.name], list[#list + 1] = s, a
      if a.size == "auto" then auto[#auto + 1] = a end
    end
  end
  local scripts = util.filter(auto, function(a) return by[a.name].scripts end)
  for _, a in ipairs(auto) do -- what is left belongs to the script's own axis, if it wants it
    if #scripts == 1 and not by[a.name].scripts then a.size = 1 end
  end
  auto = util.filter(auto, function(a) return a.size == "auto" end)
  if #auto > 1 then
    util.fail("dt.job: parallel: the axes %q and %q are both \"auto\"; give one of them a size", auto[1].name, auto[2].name)
  end
  local sorted = {}
  for rank = 1, 3 do
    for _, a in ipairs(list) do if (roles[a.splits] or 3) == rank then sorted[#sorted + 1] = a end end
  end
  return sorted, by, auto[1]
end

local function plural(n) return n == 1 and "" or "s" end

-- Gives the axis that is "auto" its size; an error shows the equation.
local function settle(list, auto, ranks)
  local others, terms = 1, {}
  for _, a in ipairs(list) do
    if a ~= auto and a.size > 1 then
      others, terms[#terms + 1] = others * a.size, a
    end
  end
  if auto then
    if ranks % others ~= 0 then
      local low = ranks // others * others
      table.sort(terms, function(x, y) return x.name < y.name end)
      util.fail("dt.job: parallel: %d rank%s not divide by %s = %d; %s%d ranks would", ranks,
        ranks == 1 and " does" or "s do", table.concat(util.map(terms, function(a) return a.name .. " " .. a.size end), " x "), others,
        low > 0 and low .. " or " or "", low + others)
    end
    auto.size = ranks // others
  elseif others ~= ranks then
    local first, rest = nil, {}
    for _, a in ipairs(list) do if a.splits == "samples" and not first then first = a end end
    first = first or terms[1] or list[1]
    table.sort(terms, function(x, y) return x.name < y.name end)
    for _, a in ipairs(terms) do if a ~= first then rest[#rest + 1] = a end end
    local without = others // first.size
    util.fail("dt.job: parallel: %s = %d%s, but %d rank%s run%s; mpirun -n %d%s would do", first.name, first.size, #rest > 0 and (" x %s = %d")
      :format(table.concat(util.map(rest, function(a) return a.name .. " " .. a.size end), " x "), others) or "", ranks, plural(ranks),
      ranks == 1 and "s" or "", others,
      ranks % without == 0 and (' or %s = "auto" (%d)'):format(first.name, ranks // without) or "")
  end
end

--- The mesh of so many ranks: { { name =, size =, splits = } ... }, outermost axis first.
function Strategy:mesh(ranks)
  local list, by, auto = axes_of(self)
  settle(list, auto, ranks)
  local order = self.p.mesh
  if not order then return list end
  local names, mesh, seen = util.map(list, function(a) return a.name end), {}, {}
  for _, name in ipairs(order) do
    if not by[name] then
      util.fail("dt.job: parallel: mesh: there is no axis %s; %s", util.show(name), util.suggest(tostring(name), names))
    end
    if seen[name] then util.fail("dt.job: parallel: mesh names the axis %q twice", name) end
    seen[name] = true
    for _, a in ipairs(list) do if a.name == name then mesh[#mesh + 1] = a end end
  end
  for _, a in ipairs(list) do
    if not seen[a.name] and a.size > 1 then
      util.fail("dt.job: parallel: mesh = { ... } leaves out the axis %q of size %d; name every axis, outermost first", a.name, a.size)
    end
    if not seen[a.name] then mesh[#mesh + 1] = a end
  end
  return mesh
end

--- The coordinate of a rank on an axis of a mesh (0 where there is no such axis), and the axis's size.
function M.coord(mesh, rank, name)
  for i = #mesh, 1, -1 do
    if mesh[i].name == name then return rank % mesh[i].size, mesh[i].size end
    rank = rank // mesh[i].size
  end
  return 0, 1
end

--- A rank's number among those that differ on the axes which split samples (or stages) alone, and how many these are.
function M.part(mesh, rank, splits)
  local at, n = 0, 1
  for _, a in ipairs(mesh) do
    if a.splits == splits then at, n = at * a.size + M.coord(mesh, rank, a.name), n * a.size end
  end
  return at, n
end

-- ---- asking ----
--- The one answer to a question that one strategy may answer: nil, or what ask(s) returned; two answers are an error.
function Strategy:one(what, ask)
  local answer, from
  for _, s in ipairs(self.list) do
    if s[what] then
      local a = ask(s)
      if a ~= nil and answer ~= nil then
        util.fail("dt.job: parallel: the strategies %s and %s both say %s; leave one of them out", from.name, s.name, what)
      end
      if a ~= nil then answer, from = a, s end
    end
  end
  return answer
end

--- The strategies that have a verb, in order.
function Strategy:with(verb) return util.filter(self.list, function(s) return s[verb] ~= nil end) end

--- Whether replicas are "equal", "differ" or are "alone".
function Strategy:replicas()
  return self:one("replicas", function(s)
    local r = s.replicas
    if type(r) == "function" then r = r(self.p) end
    if r ~= nil and not util.contains({ "equal", "differ", "alone" }, r) then
      util.fail("dt.job: parallel: replicas of %s is \"equal\", \"differ\" or \"alone\", got %s", s.name, util.show(r))
    end
    return r
  end) or "equal"
end

--- From the traced graph, in whole shapes, to that of the rank at `where` (job:where_is).
function Strategy:localize(graph, where)
  for _, s in ipairs(self:with "place") do s.place(graph, self.p, where.mesh) end
  local again = self:one("recompute", function(s) return s.recompute(graph, self.p) end)
  if again then graph:recompute(again) end
  graph:localize { rank = where.rank, sequence = self.p.sequence and { "tensor" } or nil }
end

--- Whether plans are traced with several values of options: what was traced for another rank is of no use then.
function Strategy:tries()
  for _, s in ipairs(self.list) do if s.fit and (not s.fits or s.fits(self.p)) then return true end end
  return false
end

function Strategy:fit(how, make)
  for _, s in ipairs(self:with "fit") do
    local inner = make
    make = function() return s.fit(self.p, how, inner) end
  end
  return make()
end

local Info = {} -- what reduce and gather know: docs/parallelism.md
Info.__index = Info
function Info:state(name, shape, o)
  return self.graph:local_state(("%s.bucket%d:%s"):format(self.verb, self.number, name), shape, o)
end
function Info:assign(state, value) self.graph:assign(state, value) end

local function same(a, b)
  for i = 1, math.max(#a, #b) do if a[i] ~= b[i] then return false end end
  return true
end

-- A verb that is traced for a bucket, as graph:compile calls it.
local function traced(self, verb)
  if #self:with(verb) == 0 then return nil end
  return function(graph, bucket, number, parameters, axes)
    table.sort(parameters, function(a, b) return a.begin < b.begin end)
    local info = setmetatable({ graph = graph, verb = verb == "reduce" and "hook" or verb, number = number, axes = axes,
      parameters = parameters, ranks = core.axes_size(bucket, axes) }, Info)
    return self:one(verb, function(s)
      local out = s[verb](bucket, info, self.p)
      if out == nil then return nil end
      local d = debug.getinfo(s[verb], "S")
      local at = s.where and s.where(self.p) or ("%s:%d"):format(d.short_src, d.linedefined)
      if not core.is_symbolic(out) then
        util.fail_at(at, "%s of strategy %s must return the bucket, got %s (%s)", verb, s.name, util.show(out), util.kind(out))
      end
      if not util.contains({ "f32", "bf16", "f16", "f64" }, out:dtype()) then
        util.fail_at(at, "%s of strategy %s returned %s; it must be a float", verb, s.name, out:dtype())
      end
      if verb == "reduce" and not same(out:shape(), bucket:shape()) and out:numel() * info.ranks < bucket:numel() then
        util.fail_at(at, "reduce of strategy %s returned shape %s for a bucket of shape %s; it must keep the shape, or be a share", s.name,
          util.show(out:shape()), util.show(bucket:shape()))
      end
      return out
    end)
  end
end

--- What graph:compile is told besides the job's own.
function Strategy:compile(options, _, graph, how)
  local p = self.p
  options.replicas = self:replicas()
  for _, s in ipairs(self:with "wire") do
    for key, v in util.sorted(s.wire(p, options)) do options[key] = v end
  end
  if #self:with "keep" > 0 then
    options.keep = function(q) return self:one("keep", function(s) return s.keep(q, p) end) end
  end
  if options.train then
    if #self:with "buckets" > 0 then
      options.buckets = function(list) return self:one("buckets", function(s) return s.buckets(list, p) end) end
    end
    options.reduce = traced(self, "reduce")
  end
  options.gather = traced(self, "gather")
  for _, s in ipairs(self:with "pipeline") do s.pipeline(options, p, graph, how) end
end

return M
