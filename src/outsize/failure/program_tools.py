"""Programs on a host: data and its libraries, biology, builds, runtimes, databases, services, and where they run."""

from __future__ import annotations

from outsize.failure.framework import BITWISE
from outsize.failure.program import Program, in_ram, program, where_it_ran

# Rows of a table: the program, what it leaves in a text, its ways out: what to do, the line, what it costs.
# fmt: off
DATA: tuple[Program, ...] = (
    program("scanpy", r"\bscanpy|anndata|\bsc\.(?:read|pp|tl)|\b10x\b.{0,40}matrix|h5ad",
            in_ram("keep the counts sparse, or on disk", 'ad.read_h5ad(path, backed="r")   # no .toarray(), no sc.pp.scale on all genes', "slower access", exactness=BITWISE)),
    program("xarray", r"\bxarray[/\\.]|\bxr\.open_",
            in_ram("open it in chunks, and reduce before loading", 'xr.open_dataset(path, chunks={"time": 100})   # .sel() first, .load() last', "time")),
    program("rasterio", r"\brasterio[/\\.]|\brioxarray|\bsrc\.read\(",
            in_ram("read the raster window by window", "for _, window in src.block_windows(1): src.read(1, window=window)", "time", exactness=BITWISE)),
    program("GDAL", r"\bgdal(?:warp|_translate|_merge|_polygonize|wmscript)?\b(?:\.py)?.{0,200}-\w|osgeo[/\\.]",
            in_ram("smaller blocks at a time", "gdalwarp -wm 500 --config GDAL_CACHEMAX 500 -co TILED=YES ...", "time", exactness=BITWISE)),
    program("librosa", r"\blibrosa[/\\.]|\bsoundfile\.|torchaudio\.load",
            in_ram("read the sound in pieces", "librosa.load(path, offset=start, duration=60)   # or librosa.stream()", "time", exactness=BITWISE)),
    program("nibabel", r"\bnibabel[/\\.]|get_fdata\(", in_ram("read slices, in float32", "np.asarray(img.dataobj[..., i], dtype=np.float32)   # not img.get_fdata()", "time")),
    program("tifffile", r"\btifffile[/\\.]|\bimread\(.{0,80}\.tiff?", in_ram("map the file instead of reading it", "tifffile.memmap(path)   # or tifffile.imread(path, key=range(0, 100))", "time", exactness=BITWISE)),
    program("moviepy", r"\bmoviepy|VideoFileClip", in_ram("work on a part of the film, and close clips", "clip.subclip(0, 60)   # then clip.close(); smaller: clip.resize(0.5)", "time")),
    program("gensim", r"\bgensim[/\\.]|Word2Vec\(", in_ram("stream the corpus, fewer words", "Word2Vec(LineSentence(path), max_vocab_size=2_000_000, min_count=5)", "rare words are left out")),
    program("pickle", r"pickle\.(?:load|loads|dump|dumps)\(|joblib\.load\(|\b_pickle\b", in_ram("store arrays as arrays, and map them",
            'np.save(path, x); np.load(path, mmap_mode="r")   # joblib.load(path, mmap_mode="r")', "one conversion", exactness=BITWISE)),
    program("json", r"json\.loads?\(|json[/\\](?:decoder|__init__)\.py|\.json\(\)|read_json\(",
            in_ram("read records one by one", 'for item in ijson.items(file, "item"): ...   # or one record a line: pd.read_json(path, lines=True, chunksize=10_000)', "time", exactness=BITWISE)),
    program("XML", r"etree\.(?:parse|fromstring)\(|minidom|BeautifulSoup\(", in_ram("read elements one by one", "for _, item in etree.iterparse(path): ...; item.clear()", "time", exactness=BITWISE)),
    program("requests", r"requests[/\\](?:models|api|sessions)\.py|response\.content|r\.content|iter_content", in_ram("write the answer to disk piece by piece",
            "with requests.get(url, stream=True) as r: [file.write(part) for part in r.iter_content(2**20)]", "time", exactness=BITWISE)),
    program("openpyxl", r"\bopenpyxl|read_excel\(", in_ram("read the sheet row by row", "openpyxl.load_workbook(path, read_only=True)   # or turn it into CSV, then chunksize=", "time", exactness=BITWISE)),
    program("datasets", r"\bdatasets[/\\](?:arrow|table|builder|iterable|load)|load_dataset\(|\.map\(.{0,80}num_proc",
            in_ram("stream the dataset, in small batches, with fewer processes", 'load_dataset(..., streaming=True)   # map(..., num_proc=1, writer_batch_size=100, keep_in_memory=False)', "time", exactness=BITWISE)),
    program("Polars", r"\bpolars\b|\bpl\.(?:read|scan|col|DataFrame)", in_ram("let Polars stream it", 'pl.scan_parquet(path).select(...).sink_parquet("out.parquet")   # or collect(engine="streaming")', "time", exactness=BITWISE)),
    program("DuckDB", r"(?i)\bduckdb\b", in_ram("let DuckDB keep to less and spill", "SET memory_limit = '4GB'; SET threads = 2; SET temp_directory = '/scratch';", "slower", exactness=BITWISE)),
    program("Dask", r"\bdask[/\\.]|\bdistributed[/\\.]", in_ram("smaller chunks, fewer at once, and no compute() of it all",
            'x.rechunk("64MiB").to_zarr(path)   # LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="8GiB")', "more tasks", exactness=BITWISE)),
    program("PySpark", r"\bpyspark\b|org\.apache\.spark|\bspark\.(?:sql|read|executor|driver)|SparkContext",
            in_ram("give driver and executors more, and do not collect", "--driver-memory 8g --executor-memory 8g   # or spark.driver.memory; write() instead of collect(), more partitions", "memory that others on the machine then do not have", exactness=BITWISE)),
    program("H2O", r"\bh2o\.|\bH2O", in_ram("give H2O's JVM more", 'h2o.init(max_mem_size="16G")', "memory that others then do not have", exactness=BITWISE)),
    program("statsmodels", r"\bstatsmodels[/\\.]", in_ram("fewer rows or columns, in narrow types", "sm.OLS(y.astype('float32'), x.astype('float32'))   # categories with thousands of levels: absorb or sample them", "less data")),
    program("scikit-learn", r"\bsklearn[/\\.]|scikit-learn|\bfrom sklearn",
            in_ram("learn in pieces, from sparse input, with one job", "partial_fit (MiniBatchKMeans, IncrementalPCA, SGDClassifier); n_jobs=1   # pairs: pairwise_distances_chunked()", "slightly other results")),
    program("SciPy", r"\bscipy[/\\](?:spatial|cluster|linalg|interpolate|signal)", in_ram("work through it in blocks, or on fewer points", "scipy.spatial.cKDTree(x).query(y, k=10)   # instead of all distances; linkage needs n x n / 2 numbers", "the pairs that are left out")),
    program("multiprocessing", r"multiprocessing[/\\](?:pool|process)|\bpool\.\w*map|ProcessPoolExecutor|\bPool\(|joblib[/\\]parallel|Parallel\(n_jobs|pandarallel",
            in_ram("fewer processes: each has its own copy of the data", "Pool(2)   # n_jobs=2; imap() with small chunks instead of map(), so that results do not pile up", "less runs in parallel", exactness=BITWISE)),
    program("an array made whole", r"\bnp\.(?:zeros|ones|empty|full)\((?!.{0,200}dtype=(?:np\.)?[\"']?(?:u?int8|float16|bool))",
            in_ram("make it on disk or one batch at a time, in a narrow type", 'np.lib.format.open_memmap("x.npy", "w+", "float32", shape)   # then outsize.open("x.npy"); labels and words as integers, not one-hot', "time")),
    program("matplotlib", r"\bmatplotlib[/\\.]|\bplt\.", in_ram("draw fewer points, and close figures", 'plt.plot(x[::100], y[::100]); plt.close("all")', "less detail")),
    program("tokenizers", r"\btokenizers?[/\\.].{0,80}(?:train|encode)|sentencepiece|spm_train", in_ram("learn from a sample of the text", "spm_train --input_sentence_size=2000000 --shuffle_input_sentence=true   # tokenizers: train_from_iterator", "less text is seen")),
)

BIOLOGY: tuple[Program, ...] = (
    program("STAR", r"\bSTAR\b.{0,60}(?:--|genome|align)|genomeGenerate|--runThreadN|limitBAMsortRAM", in_ram("a sparser index, fewer threads, or a node with 32 GB or more", "--genomeSAsparseD 2 --genomeSAindexNbases 12 --limitBAMsortRAM 20000000000", "slower")),
    program("samtools", r"\bsamtools\b", in_ram("less for each thread of the sort", "samtools sort -m 512M -@ 4 ...", "time", exactness=BITWISE)),
    program("SPAdes", r"(?i)\bspades|metaspades|unicycler", in_ram("more memory, fewer threads, or fewer reads", "spades.py -m 500 -t 8 ...   # GB it may take; reads: normalise (bbnorm) or subsample", "time")),
    program("MEGAHIT", r"(?i)\bmegahit", in_ram("more memory, or fewer reads", "megahit -m 0.9 --min-count 3 --k-min 27 ...   # reads: subsample, or assemble each sample alone", "rare k-mers are left out")),
    program("Kraken", r"(?i)\bkraken2?\b", in_ram("map the database instead of loading it, or a smaller one", "kraken2 --memory-mapping ...   # or a capped database: standard-8", "slower")),
    program("minimap2", r"\bminimap2?\b", in_ram("a part of the index at a time, fewer threads", "minimap2 -I 2g -K 100M -t 4 ...", "time", exactness=BITWISE)),
    program("nucmer", r"\bnucmer|\bmummer", in_ram("align one chromosome or part at a time, repeats masked, with fewer threads", "nucmer -t 4 ref_chr1.fa query_chr1.fa   # without --maxmatch", "several runs")),
    program("LAST", r"\blastal\b|\blastdb\b", in_ram("mask repeats, smaller batches, fewer threads", "lastdb -P8 -uNEAR -R11 -c mydb genome.fa; lastal -P4 -i 100M ...", "time")),
    program("GATK", r"(?i)\bgatk\b|\bpicard\b|HaplotypeCaller", in_ram("give its JVM more, and split by interval", 'gatk --java-options "-Xmx16g" ... -L chr1   # picard: java -Xmx16g -jar picard.jar', "several runs", exactness=BITWISE)),
    program("Cell Ranger", r"(?i)cell ?ranger|space ?ranger", in_ram("tell it what it may take", "cellranger count --localmem=48 --localcores=8 ...", "slower", exactness=BITWISE)),
    program("Trinity", r"\bTrinity\b|Inchworm|Butterfly", in_ram("more memory, or normalised reads", "Trinity --max_memory 100G --CPU 8 ...   # about 1 GB for a million reads", "time")),
    program("BLAST", r"(?i)\bblast[npx]?\b|\bdiamond (?:blast|make)", in_ram("fewer queries and smaller blocks at once", "diamond blastp -b 1.0 -c 4 ...   # blast: split the query, -num_threads 4", "time", exactness=BITWISE)),
    program("R packages", r"Seurat|DESeq2|Bioconductor", in_ram("keep the matrix sparse or on disk, with one worker", 'plan("sequential"); options(future.globals.maxSize = 8e9)   # BPCells or HDF5Array for the counts', "time")),
)

MANAGERS: tuple[Program, ...] = (
    program("Nextflow", r"(?i)nextflow|nf-core|\.command\.(?:log|sh|run|err)|work/[0-9a-f]{2}/[0-9a-f]{6}", in_ram("ask more for that process", "process { withName: NAME { memory = '32 GB' } }   # in nextflow.config", "memory that others then do not have", exactness=BITWISE)),
    program("Snakemake", r"(?i)snakemake|Snakefile|RuleException|Error in rule ", in_ram("ask more for that rule, or run fewer at once", "resources: mem_mb=32000   # in the rule; snakemake --cores 4", "memory that others then do not have", exactness=BITWISE)),
)

BUILDS: tuple[Program, ...] = (
    program("Cargo", r"\bcargo (?:build|install|test|run|check|bench)\b|\brustc\b|could not compile", in_ram("fewer crates at once, less debug information", "CARGO_BUILD_JOBS=1 CARGO_PROFILE_DEV_DEBUG=0 cargo build   # release: lto=off, more codegen-units", "a slower build", exactness=BITWISE)),
    program("Jest", r"(?i)\bjest\b|vitest", in_ram("fewer workers, renewed when they grow", "jest --maxWorkers=2 --workerIdleMemoryLimit=512MB   # and NODE_OPTIONS=--max-old-space-size=4096", "slower tests", exactness=BITWISE)),
    program("Composer", r"(?i)\bcomposer (?:install|update|require)|phpstan|phpunit", in_ram("lift PHP's limit for this command", "COMPOSER_MEMORY_LIMIT=-1 composer update   # phpstan --memory-limit=2G; php -d memory_limit=-1", "memory", exactness=BITWISE)),
    program("Gradle", r"(?i)\bgradlew?\b|kotlin ?daemon|:app:|\bAndroid Studio|dexing|\bD8\b|\bR8\b", in_ram("raise the heap of Gradle's daemon, and fewer workers", "org.gradle.jvmargs=-Xmx4g -XX:MaxMetaspaceSize=1g   # gradle.properties; org.gradle.workers.max=2", "memory", exactness=BITWISE)),
    program("Maven", r"(?i)\bmvnw?\b|\bmaven\b|surefire", in_ram("raise Maven's heap", 'MAVEN_OPTS="-Xmx4g" mvn ...   # tests: surefire argLine -Xmx2g', "memory", exactness=BITWISE)),
    program("sbt", r"\bsbt\b|\bscalac\b", in_ram("raise sbt's heap", "sbt -J-Xmx4g ...   # or SBT_OPTS=-Xmx4g", "memory", exactness=BITWISE)),
    program("Bazel", r"(?i)\bbazel", in_ram("fewer actions at once", "bazel build --jobs=4 --local_ram_resources=HOST_RAM*.5 ...", "a slower build", exactness=BITWISE)),
    program("GHC", r"\bghc\b|\bcabal\b|stack build", in_ram("one module at a time, with a heap that is given back", "stack build -j1 --ghc-options='+RTS -M4g -RTS'", "a slower build", exactness=BITWISE)),
    program("go build", r"\bgo (?:build|install|test|vet)\b|cmd/compile|golangci", in_ram("fewer packages at once", "GOMAXPROCS=2 GOGC=50 go build -p 1 ./...", "a slower build", exactness=BITWISE)),
    program("pip", r"\bpip3? install\b|\(pip3?\)|\bpipenv\b|\bpoetry\b|Collecting \w|Building wheel|pip[/\\]_internal|cachecontrol", in_ram("install without the cache, and build with fewer jobs", "MAX_JOBS=2 pip install --no-cache-dir NAME   # a wheel instead of source; more swap", "a slower install", exactness=BITWISE)),
    program("conda", r"\b(?:conda|mamba) (?:install|env|create|update)|Solving environment|Collecting package metadata", in_ram("a solver that holds less", "mamba install NAME   # or conda config --set solver libmamba; fewer channels", "nothing", exactness=BITWISE)),
    program("npm", r"\bnpm (?:install|i|ci)\b", in_ram("install with fewer at once, or add swap", "NODE_OPTIONS=--max-old-space-size=2048 npm ci --maxsockets 1   # a small server: 2 GB of swap", "slower", exactness=BITWISE)),
    program("make", r"\bmake\[?[0-9]?\]?: \*\*\*|\bninja: |\bcmake --build|\bmake -j|\bcc1plus|\bg\+\+|\bclang\+\+|\bnvcc\b|\bcollect2\b|/usr/bin/ld\b|\bld: ", in_ram("fewer files at once: each compiler takes its own memory", "make -j2   # ninja -j2; MAX_JOBS=2; more swap for the linker", "a slower build", exactness=BITWISE)),
)

SERVICES: tuple[Program, ...] = (
    program("Chrome", r"(?i)puppeteer|playwright|selenium|chromedriver|headless.?chrom|session deleted because of page crash", in_ram("let Chrome use /tmp instead of /dev/shm, and fewer pages at once", "--disable-dev-shm-usage   # docker run --shm-size=1g; close pages and browsers", "nothing", exactness=BITWISE)),
    program("Elasticsearch", r"(?i)elastic ?search|opensearch", in_ram("a heap of half of what its container may have", "ES_JAVA_OPTS='-Xms1g -Xmx1g'   # and 2 GB or more for the container or pod: the rest is for files and buffers", "memory", exactness=BITWISE)),
    program("Kafka", r"(?i)\bkafka\b", in_ram("raise Kafka's heap", 'KAFKA_HEAP_OPTS="-Xms2g -Xmx2g"', "memory", exactness=BITWISE)),
    program("Logstash", r"(?i)\blogstash", in_ram("raise Logstash's heap, or smaller batches", 'LS_JAVA_OPTS="-Xms2g -Xmx2g"   # pipeline.batch.size, pipeline.workers', "memory", exactness=BITWISE)),
    program("Cassandra", r"(?i)\bcassandra\b", in_ram("raise its heap within RAM", "MAX_HEAP_SIZE=8G HEAP_NEWSIZE=800M   # cassandra-env.sh", "memory", exactness=BITWISE)),
    program("Neo4j", r"(?i)\bneo4j|Java heap.{0,40}cypher", in_ram("raise its heap, and smaller transactions", "server.memory.heap.max_size=8g   # neo4j.conf; CALL { ... } IN TRANSACTIONS OF 10000 ROWS", "memory", exactness=BITWISE)),
    program("Solr", r"(?i)\bsolr\b", in_ram("raise its heap", "SOLR_HEAP=8g   # solr.in.sh", "memory", exactness=BITWISE)),
    program("Minecraft", r"(?i)minecraft|\bforge server|spigot|paper-\d|bukkit", in_ram("raise the game's heap", "-Xmx4G   # launcher: JVM arguments; server: java -Xms4G -Xmx4G -jar server.jar", "memory", exactness=BITWISE)),
    program("Jenkins", r"(?i)\bjenkins", in_ram("raise the controller's heap, or run builds on agents", 'JAVA_OPTS="-Xmx4g"   # JENKINS_JAVA_OPTIONS for the packages', "memory", exactness=BITWISE)),
    program("SonarQube", r"(?i)sonar(?:qube|-scanner)", in_ram("raise the scanner's heap", 'SONAR_SCANNER_JAVA_OPTS="-Xmx2g"   # server: sonar.ce.javaOpts=-Xmx2g', "memory", exactness=BITWISE)),
    program("Tomcat", r"(?i)\btomcat\b|catalina", in_ram("raise Tomcat's heap", 'CATALINA_OPTS="-Xmx4g"   # bin/setenv.sh; then a heap dump: -XX:+HeapDumpOnOutOfMemoryError', "memory", exactness=BITWISE)),
    program("IDE", r"(?i)intellij|pycharm|webstorm|\beclipse\b|clangd|gopls|pylance|tsserver|jdtls", in_ram("give the editor's process more, and index less", "Help > Change Memory Settings   # VS Code: typescript.tsserver.maxTsServerMemory, java.jdt.ls.vmargs; exclude build folders", "memory", exactness=BITWISE)),
    program("MySQL", r"(?i)\bmysqld?\b|mariadb|innodb", in_ram("smaller buffers", "innodb_buffer_pool_size=512M, max_connections=50   # my.cnf", "slower queries", exactness=BITWISE)),
    program("MongoDB", r"(?i)\bmongod\b|wiredtiger", in_ram("a smaller cache", "storage.wiredTiger.engineConfig.cacheSizeGB: 1   # mongod.conf", "slower queries", exactness=BITWISE)),
    program("Apache", r"\((?:apache2?|httpd|php-fpm[\d.]*|nginx)\)", in_ram("fewer workers at once", "MaxRequestWorkers 50   # Apache; PHP-FPM: pm.max_children = 10", "fewer requests at once", exactness=BITWISE)),
    program("a JVM", r"\(java\)|task=java\b", in_ram("a heap that leaves room for the rest of the machine", "java -Xmx4g ...   # heap, threads and buffers together below RAM or the container's limit", "more collections", exactness=BITWISE)),
    program("PostgreSQL", r"\(postgres(?:ql|master)?\)|task=postgres\b", in_ram("less for each query, fewer connections", "work_mem = 16MB, max_connections = 50, shared_buffers = 25 % of RAM   # postgresql.conf", "slower queries", exactness=BITWISE)),
    program("R", r"\((?:R|rsession|Rscript)\)|task=R\b", in_ram("fewer workers of R, and let go what is no longer needed", "plan(sequential); rm(big); gc()   # mc.cores = 2", "time", exactness=BITWISE)),
    program("Prometheus", r"(?i)\bprometheus\b", in_ram("fewer series, or more memory", "topk(10, count by (__name__)({__name__=~\".+\"}))   # then drop them: metric_relabel_configs; longer scrape_interval", "fewer metrics")),
    program("InfluxDB", r"(?i)\binflux(?:d|db)?\b", in_ram("fewer series, an index on disk, shorter queries", 'index-version = "tsi1"   # 1.x: influxdb.conf; cache-max-memory-size', "slower queries")),
    program("Home server", r"(?i)\bnextcloud|\bjellyfin|\bimmich|\bplex\b|home ?assistant", in_ram("more memory for its container or machine, and fewer jobs at once", "docker stats   # who takes it; then fewer workers or jobs in its settings, and swap", "memory", exactness=BITWISE)),
)

PLACES: tuple[Program, ...] = (
    program("Kubernetes", r"(?i)kubectl|kubelet|\bpods?\b|CrashLoopBackOff|Last State:? +Terminated|\bk8s\b|helm ",
            where_it_ran("see whether the pod reached its limit or failed its probe", "kubectl describe pod NAME   # OOMKilled: raise resources.limits.memory; Error with 137: the liveness probe, as a rule")),
    program("CI", r"(?i)gitlab[- ]runner|github actions|##\[error\]|circleci|travis|buildkite|azure pipelines|appveyor|Job failed: exit code|Process completed with exit code|bitbucket",
            where_it_ran("a larger runner, or less at once in that job", "fewer parallel jobs (-j2, --maxWorkers=2, -n 2)   # GitLab: KUBERNETES_MEMORY_LIMIT or the runner's memory; CircleCI: resource_class: large", "a slower or dearer build")),
    program("Docker", r"(?i)\bdocker(?:-compose| compose)?\b|\bpodman\b|containerd|exited with code 137|exited \(137\)",
            where_it_ran("see whether the container was killed for memory, then raise what it may have", "docker inspect --format '{{.State.OOMKilled}}' NAME   # docker stats; --memory=4g; Docker Desktop > Settings > Resources", "memory")),
    program("Slurm", r"(?i)slurm|\bsbatch\b|\bsrun\b|scancel", where_it_ran("ask Slurm for more", "sbatch --mem=64G job.sh   # sacct -j JOBID --format=MaxRSS,ReqMem,State says what it took", "waiting")),
    program("systemd", r"(?i)systemctl|systemd\[1\]|\.service\b", where_it_ran("see whether it was memory, and who had it", "journalctl -k | grep -i 'out of memory'   # then MemoryMax= of the unit, or less at once")),
)
# fmt: on
